"""What routing is worth on digits: calibration, asking the router rarely, and p(k | class)."""
