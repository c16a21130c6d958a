"""What a run will do, as frozen data: from a user's request to sampler, noise and events. No torch.

Importing it registers the mechanisms that come with hf_dp.
"""

from hf_dp.plans.dp_fp import FrozenPlan as FrozenPlan
from hf_dp.plans.dp_fp import PrivateEncoderPlan as PrivateEncoderPlan
from hf_dp.plans.dp_fp import PublishedPlan as PublishedPlan
from hf_dp.plans.dp_sgd import DpSgdPlan as DpSgdPlan
from hf_dp.plans.dp_sgd import Search as Search
from hf_dp.plans.draws import Draw as Draw
from hf_dp.plans.draws import Poisson as Poisson
from hf_dp.plans.draws import RandomAllocation as RandomAllocation
from hf_dp.plans.draws import Schedule as Schedule
from hf_dp.plans.draws import TruncatedPoisson as TruncatedPoisson
from hf_dp.plans.draws import UserRows as UserRows
from hf_dp.plans.draws import register_draw as register_draw
from hf_dp.plans.mechanism import MechanismPlan as MechanismPlan
from hf_dp.plans.mechanism import PlannedRelease as PlannedRelease
from hf_dp.plans.mechanism import Words as Words
from hf_dp.plans.mechanism import register_plan as register_plan
from hf_dp.plans.privacy import PrivacyPlan as PrivacyPlan
from hf_dp.plans.selection import SelectionPlan as SelectionPlan
