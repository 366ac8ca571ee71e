"""hddm's nodes in a real ComfyUI."""
