"""Networks. They know no schedule, and what they predict is not their business."""
