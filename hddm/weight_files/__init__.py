"""Files of weights: read with bounds and without running what they hold, written as a stream."""

from hddm.weight_files.finite import refuse_non_finite as refuse_non_finite
from hddm.weight_files.index_files import read_index as read_index
from hddm.weight_files.kinds import Kind as Kind
from hddm.weight_files.kinds import kind_of as kind_of
from hddm.weight_files.pickles import read_pickle as read_pickle
from hddm.weight_files.safetensors_files import TensorInfo as TensorInfo
from hddm.weight_files.safetensors_files import read_header as read_header
from hddm.weight_files.safetensors_files import read_safetensors as read_safetensors
from hddm.weight_files.writing import Planned as Planned
from hddm.weight_files.writing import write_safetensors as write_safetensors
