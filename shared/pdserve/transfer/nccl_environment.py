"""What NCCL links need in a process's environment before torch loads; whoever starts the process may lack torch."""

from __future__ import annotations

INIT_PATIENCE = 8.0  # seconds for the first operation, which makes the communicator; twice that is below OPEN_DEADLINE
# What has to be in the environment before torch loads, and why.
ENVIRONMENT = {
    # On a group's error ProcessGroupNCCL ends the process, and so does its monitor when the watchdog stalls.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    # No watchdog thread: it polls each group ten times a second, and after an error it sleeps for a minute with the
    # lock that the next operation and the group's destructor need.
    "TORCH_NCCL_BLOCKING_WAIT": "1",
    # No flight recorder: it takes the GIL for a Python backtrace at every operation.
    "TORCH_FR_BUFFER_SIZE": "0",
    # A non-blocking communicator's init gives up after so many seconds; an abort has to wait for it.
    "TORCH_NCCL_NONBLOCKING_TIMEOUT": f"{INIT_PATIENCE:.0f}",
}
