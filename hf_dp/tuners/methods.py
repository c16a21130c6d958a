"""All of hf_dp's ways to choose what trains; importing this registers them and their tuners."""

import hf_dp.tuners.frost.tuner
import hf_dp.tuners.rgp.tuner
import hf_dp.tuners.single_entries.tuner  # noqa: F401
from hf_dp.tuners.adapter import AdapterConfig as AdapterConfig
from hf_dp.tuners.frost.config import FrostConfig as FrostConfig
from hf_dp.tuners.public_choice import BitFitConfig as BitFitConfig
from hf_dp.tuners.public_choice import HeadConfig as HeadConfig
from hf_dp.tuners.public_choice import RandomConfig as RandomConfig
from hf_dp.tuners.public_choice import TopBlocksConfig as TopBlocksConfig
from hf_dp.tuners.rgp.config import RgpConfig as RgpConfig
from hf_dp.tuners.single_entries.config import ParamConfig as ParamConfig
from hf_dp.tuners.single_entries.config import PvalConfig as PvalConfig
