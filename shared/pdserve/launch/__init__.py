"""Starting a suite on this machine as child processes, and keeping it whole: all of it runs, or none of it does."""

from pdserve.launch.machine import Machine
from pdserve.launch.models import resolve_model
from pdserve.launch.plan import ModelPart, ServicePlan, SuitePlan, TlsFiles, WorkerOptions, plan_suite
from pdserve.launch.process import LaunchEvent, Service
from pdserve.launch.suite import Suite, SuiteFailed

__all__ = [
    "LaunchEvent",
    "Machine",
    "ModelPart",
    "Service",
    "ServicePlan",
    "Suite",
    "SuiteFailed",
    "SuitePlan",
    "TlsFiles",
    "WorkerOptions",
    "plan_suite",
    "resolve_model",
]
