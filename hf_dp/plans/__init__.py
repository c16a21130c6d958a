"""What a run will do, as frozen data: from a user's request to sampler, noise and events. No torch.

Importing it registers the mechanisms that come with hf_dp.
"""

from hf_dp.plans.allocation import AllocatedPlan as AllocatedPlan
from hf_dp.plans.best_of_runs import BestOfRunsPlan as BestOfRunsPlan
from hf_dp.plans.dp_fp import FrozenPlan as FrozenPlan
from hf_dp.plans.dp_fp import PrivateEncoderPlan as PrivateEncoderPlan
from hf_dp.plans.dp_fp import PublishedPlan as PublishedPlan
from hf_dp.plans.dp_sgd import DpSgdPlan as DpSgdPlan
from hf_dp.plans.mechanism import MechanismPlan as MechanismPlan
from hf_dp.plans.mechanism import Schedule as Schedule
from hf_dp.plans.mechanism import Words as Words
from hf_dp.plans.mechanism import register_plan as register_plan
from hf_dp.plans.noised_loss import NoisedLossPlan as NoisedLossPlan
from hf_dp.plans.privacy import PrivacyPlan as PrivacyPlan
from hf_dp.plans.privacy import PrivacyRequest as PrivacyRequest
from hf_dp.plans.release import PlannedRelease as PlannedRelease
from hf_dp.plans.selection import SelectionPlan as SelectionPlan
