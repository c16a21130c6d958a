"""How privacy is obtained: the steps of the mechanisms. Importing it registers those of hf_dp.

To add one: a plan (:class:`hf_dp.plans.MechanismPlan`) and a step (:class:`Mechanism`), each
registered by its decorator.
"""

from hf_dp.mechanisms.base import Clipped as Clipped
from hf_dp.mechanisms.base import Mechanism as Mechanism
from hf_dp.mechanisms.base import mechanism_for as mechanism_for
from hf_dp.mechanisms.base import register_mechanism as register_mechanism
from hf_dp.mechanisms.dp_fp import Frozen as Frozen
from hf_dp.mechanisms.dp_fp import PrivateEncoder as PrivateEncoder
from hf_dp.mechanisms.dp_fp import Published as Published
from hf_dp.mechanisms.dp_sgd import DpSgd as DpSgd
