"""Public helpers for tests: fakes behind the product's own protocols, fault plans, and the laws."""

from sgpu.testing.plan import Fault as Fault
from sgpu.testing.plan import FaultPlan as FaultPlan

__all__ = ["Fault", "FaultPlan"]
