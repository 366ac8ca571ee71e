"""The JSON files that mark what a folder is; who looks for one needs nothing else of its kind."""

ENSEMBLE_FILE = "ensemble.json"
EXPERT_FILE = "expert.json"
ROUTER_FILE = "router.json"
