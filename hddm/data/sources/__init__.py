"""Sources of images: folders, tar shards and Parquet files, read the same way."""

from hddm.data.sources.base import ImageSource as ImageSource
from hddm.data.sources.opening import open_source as open_source
