"""The JSON files that mark what a folder is; who looks for one needs nothing else of its kind."""

BENCHMARK_FILE = "benchmark.json"
ENSEMBLE_FILE = "ensemble.json"
EXPERT_FILE = "expert.json"
FEATURES_FILE = "features.json"
RESULTS_FILE = "results.json"
ROUTER_FILE = "router.json"
SAMPLING_FILE = "sampling.json"
