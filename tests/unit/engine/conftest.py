"""One CPU thread: the machine is shared, and tiny models gain nothing from more. And what tests of kernels share."""

from __future__ import annotations

import shutil

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def kernels(tmp_path_factory):
    """A folder of their own for the kernels of lesser machines."""
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture(params=["", "-mno-avx512bf16", "-mno-avx512f"], ids=["as it is", "no bf16", "no avx512"])
def machine(request, kernels, monkeypatch):
    """Kernels are compiled for this machine, and for lesser ones; what is left out."""
    if request.param:
        if torch.backends.cpu.get_cpu_capability() != "AVX512":
            pytest.skip("this machine has nothing to leave out")
        script = kernels / f"cc{request.param}"
        if not script.exists():
            script.write_text(f'#!/bin/sh\nexec {shutil.which("cc")} "$@" {request.param}\n')
            script.chmod(0o700)
        monkeypatch.setenv("CC", str(script))
        monkeypatch.setenv("PDSERVE_CACHE", str(kernels))
    return request.param


@pytest.fixture(params=[1, 2])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)
