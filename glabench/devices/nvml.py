"""The state of a GPU, read from NVIDIA's management library (NVML). Values that cannot be read are None."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

Value = TypeVar("Value")

# Reasons for a lower clock that come from the device's condition; idling and application settings are left out.
_REASONS = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "temperature",
    0x40: "hardware temperature",
    0x80: "power brake",
}


@dataclass(frozen=True)
class DeviceState:
    """One reading: clocks in MHz, temperature in degrees Celsius, power in watts, reasons that hold the clock back."""

    sm_clock_mhz: float | None
    memory_clock_mhz: float | None
    temperature_c: float | None
    power_w: float | None
    throttle: frozenset[str] | None


@dataclass(frozen=True)
class Processes:
    """Processes on the GPU: MiB of this process, as the driver counts it, and the number of other processes."""

    own_memory_mib: float | None
    others: int | None


class Nvml:
    """Reads one GPU. A reading takes microseconds, except for the energy counter, which takes 3 ms."""

    def __init__(self, library: Any, handle: Any) -> None:
        self._library = library
        self._handle = handle

    def _read(self, function: str, *arguments: Any) -> Any:
        """The result of a function of the library; None if the device, driver or container does not support it."""
        try:
            return getattr(self._library, function)(self._handle, *arguments)
        except (self._library.NVMLError, AttributeError):
            return None

    def state(self) -> DeviceState:
        """The present clocks, temperature, power and throttle reasons."""
        library = self._library
        reasons = self._read("nvmlDeviceGetCurrentClocksThrottleReasons")
        return DeviceState(
            _as(float, self._read("nvmlDeviceGetClockInfo", library.NVML_CLOCK_SM)),
            _as(float, self._read("nvmlDeviceGetClockInfo", library.NVML_CLOCK_MEM)),
            _as(float, self._read("nvmlDeviceGetTemperature", library.NVML_TEMPERATURE_GPU)),
            _as(lambda milliwatts: milliwatts / 1e3, self._read("nvmlDeviceGetPowerUsage")),
            _as(lambda bits: frozenset(name for bit, name in _REASONS.items() if bits & bit), reasons),
        )

    def energy_j(self) -> float | None:
        """Joules that the board has used since the driver was loaded."""
        return _as(lambda millijoules: millijoules / 1e3, self._read("nvmlDeviceGetTotalEnergyConsumption"))

    def max_sm_clock_mhz(self) -> float | None:
        """MHz of the SM clock if nothing holds it back."""
        return _as(float, self._read("nvmlDeviceGetMaxClockInfo", self._library.NVML_CLOCK_SM))

    def processes(self, computes: bool = True) -> Processes:
        """This process's memory and the number of other processes; `computes` if this process also uses the GPU.

        In a container the driver may list processes under ids of the host. One of them is then this process, so all
        but one are others. If it lists none although this process computes, nothing is known.
        """
        found = self._read("nvmlDeviceGetComputeRunningProcesses")
        if found is None or (computes and not found):
            return Processes(None, None)
        own = next((p for p in found if p.pid == os.getpid()), None)
        memory = _as(lambda size: size / 2**20, own.usedGpuMemory) if own is not None else None
        return Processes(memory, len(found) - (1 if computes or own is not None else 0))

    def utilization_pct(self) -> float | None:
        """Percentage of the last moments in which a kernel ran."""
        return _as(lambda rates: float(rates.gpu), self._read("nvmlDeviceGetUtilizationRates"))

    def settings(self) -> dict[str, Any]:
        """Settings of the device: ECC, MIG, highest SM clock (MHz) and power limit (W)."""
        return {
            "ecc": _as(lambda modes: bool(modes[0]), self._read("nvmlDeviceGetEccMode")),
            "mig": bool(self._read("nvmlDeviceIsMigDeviceHandle"))
            or _as(lambda modes: bool(modes[0]), self._read("nvmlDeviceGetMigMode")),
            "max_sm_clock_mhz": self.max_sm_clock_mhz(),
            "power_limit_w": _as(lambda milliwatts: milliwatts / 1e3, self._read("nvmlDeviceGetEnforcedPowerLimit")),
        }

    def driver(self) -> str | None:
        """The driver's version."""
        try:
            return str(self._library.nvmlSystemGetDriverVersion())
        except self._library.NVMLError:
            return None


def _as(convert: Callable[[Any], Value], reading: Any) -> Value | None:
    return None if reading is None else convert(reading)


def bare_uuid(properties: Any) -> str | None:
    """The UUID in torch's properties of a GPU, without a prefix; None if this build of torch does not provide it."""
    uuid = getattr(properties, "uuid", None)
    return None if uuid is None else str(uuid).removeprefix("GPU-").removeprefix("MIG-")


def open_nvml() -> Nvml | None:
    """NVML of torch's current GPU; None without NVML (AMD, WSL, some containers) or without its Python package.

    The GPU is found by UUID, because NVML's numbering ignores CUDA_VISIBLE_DEVICES.
    """
    import torch

    try:
        import pynvml
    except ImportError:
        return None
    try:
        uuid = bare_uuid(torch.cuda.get_device_properties())
        pynvml.nvmlInit()
        return Nvml(pynvml, _find_handle(pynvml, uuid)) if uuid is not None else None
    except (pynvml.NVMLError, AttributeError, RuntimeError, AssertionError, OSError):
        return None


def _find_handle(library: Any, uuid: str) -> Any:
    """The handle of a GPU or of a MIG part; torch's properties give the UUID of either in the same form."""
    try:
        return library.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    except library.NVMLError:
        return library.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}")
