"""What a student of a mixed-objective ensemble is worth on digits, at a quarter of its training compute."""
