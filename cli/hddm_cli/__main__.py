"""``python -m hddm_cli``, where the ``hddm`` command is not on the path."""

from hddm_cli.app import app

app()
