#!/bin/sh
# Builds the wheel with the given Python, installs it alone into an empty virtual environment outside of the
# checkout, and converts, inspects and samples a diffusers pipeline there.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$1" -m build --wheel --no-isolation --outdir "$folder" .
"$1" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet "$folder"/*.whl
cd "$folder"
unset PYTHONPATH
PATH=$folder/venv/bin:$PATH

hddm --help
python - <<'END'
from diffusers import DDPMPipeline, DDPMScheduler, UNet2DModel

blocks = {"down_block_types": ("DownBlock2D",), "up_block_types": ("UpBlock2D",), "block_out_channels": (32,)}
unet = UNet2DModel(sample_size=8, in_channels=1, out_channels=1, layers_per_block=1, **blocks)
DDPMPipeline(unet, DDPMScheduler()).save_pretrained("pipeline")
END
hddm convert pipeline --out expert
hddm inspect expert
hddm sample expert --out samples --num-images 2 --steps 2
test -f samples/00001.png
echo "the wheel installs and works"
