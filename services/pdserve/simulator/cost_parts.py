"""The parts of a plan that say what work costs: a model's shape, and a cost model in one of several forms."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, Discriminator, Field, Tag, model_validator

from pdserve.simulator.costs import MOONCAKE, CostModel, Fitted, Hardware, ModelShape, Roofline, Table
from pdserve.simulator.measured import read_measured
from pdserve.simulator.parts import Part, listed, one_of
from pdserve.simulator.presets import HARDWARE, MODELS


class ShapePart(Part):
    """A model by its figures."""

    parameters: float = Field(gt=0, description="that a token passes")
    layers: int = Field(ge=1)
    hidden: int = Field(ge=1, description="hidden size")
    kv_width: int = Field(ge=1, description="KV heads times head size")
    bytes: Literal[2, 4] = Field(2, description="of a number, in weights and KV")

    def shape(self) -> ModelShape:
        return ModelShape(self.parameters, self.layers, self.hidden, self.kv_width, self.bytes)


class HardwarePart(Part):
    """An accelerator by its figures."""

    flops: float = Field(gt=0, description="a second, at 16 bits")
    memory: float = Field(gt=0, description="bytes a second")
    flops_share: float = Field(0.55, gt=0, le=1, description="the share that is reached")
    memory_share: float = Field(0.8, gt=0, le=1, description="the share that is reached")
    overhead_ms: float = Field(2.0, ge=0, description="of a step, for everything else")

    def hardware(self) -> Hardware:
        return Hardware(self.flops, self.memory, self.flops_share, self.memory_share, self.overhead_ms / 1e3)


NAME = "by name"  # the tag of what is no part


def _name_or(part: type[Part]) -> Discriminator:
    """A part, or the name of one."""
    return Discriminator(lambda value: part.__name__ if isinstance(value, dict | BaseModel) else NAME)


ModelKey = Annotated[
    Annotated[str, AfterValidator(one_of(MODELS)), listed(MODELS), Tag(NAME)] | Annotated[ShapePart, Tag("ShapePart")],
    _name_or(ShapePart),
]
HardwareKey = Annotated[
    Annotated[str, AfterValidator(one_of(HARDWARE)), listed(HARDWARE), Tag(NAME)]
    | Annotated[HardwarePart, Tag("HardwarePart")],
    _name_or(HardwarePart),
]


class RooflinePart(Part):
    """The longer of computing and reading, from data sheets."""

    hardware: HardwareKey = Field(description="a name, or its figures")
    devices: int = Field(default=1, ge=1, description="of one worker, in tensor parallel")

    def cost_model(self, shape: ModelShape) -> CostModel:
        one = self.hardware.hardware() if isinstance(self.hardware, HardwarePart) else HARDWARE[self.hardware]
        shares = one.flops_share, one.memory_share, one.overhead
        return Roofline(Hardware(one.flops * self.devices, one.memory * self.devices, *shares), shape)


class FittedPart(Part):
    """Coefficients in ms."""

    prefill: tuple[float, float, float] = Field(description="constant, for each token, for each token squared")
    decode: tuple[float, float, float] = Field(description="constant, for each token of context, for each answer")

    @model_validator(mode="after")
    def _takes_time(self) -> FittedPart:
        if min(self.decode) < 0 or not any(self.decode):
            raise ValueError("decode coefficients must be 0 or more, and not all of them 0")
        return self

    def cost_model(self, shape: ModelShape) -> CostModel:
        return Fitted(self.prefill, self.decode)


class SplitwisePart(Part):
    """Measurements, as Splitwise's repository has them."""

    splitwise: Path = Field(description="its perf_model.csv")
    model: str = Field("llama2-70b", description="as the file calls it")
    hardware: str = Field("h100-80gb", description="as the file calls it")
    devices: int = Field(8, ge=1, description="of one worker, in tensor parallel")
    by_tokens: bool = Field(False, description="read decode times as Splitwise's own simulator does")

    def cost_model(self, shape: ModelShape) -> CostModel:
        return Table.splitwise(self.splitwise, self.model, self.hardware, self.devices, by_tokens=self.by_tokens)


class DistServePart(Part):
    """Fits, as DistServe's repository has them."""

    distserve: Path = Field(description="one of its profile_data/*.json")
    model: str = Field("facebook/opt-13b", description="as the file calls it")
    devices: int = Field(1, ge=1, description="of one worker, in tensor parallel")

    def cost_model(self, shape: ModelShape) -> CostModel:
        return Fitted.distserve(self.distserve, self.model, self.devices)


class MeasuredPart(Part):
    """What the workers of a real suite learned of themselves."""

    measured: Path = Field(description="what pdserve probe speed --json printed")
    model: str | None = Field(None, description="where the file has several")

    def cost_model(self, shape: ModelShape) -> CostModel:
        return read_measured(self.measured, self.model)


# The keys that tell cost models apart, the telling ones first.
_COSTS: dict[str, type[Part]] = {
    "splitwise": SplitwisePart,
    "distserve": DistServePart,
    "measured": MeasuredPart,
    "prefill": FittedPart,
    "decode": FittedPart,
    "hardware": RooflinePart,
}
# Tags of unions, which stand in pydantic's paths and are no keys, with the parts that they lead to.
KINDS: dict[str, type[Part] | None] = {
    NAME: None,
    **{part.__name__: part for part in _COSTS.values()},
    ShapePart.__name__: ShapePart,
    HardwarePart.__name__: HardwarePart,
}


def _kind(value: Any) -> str | None:
    match value:
        case "mooncake":
            return NAME
        case BaseModel():
            return type(value).__name__
        case dict():
            return next((part.__name__ for key, part in _COSTS.items() if key in value), None)
    return None


CostKey = Annotated[
    Annotated[Literal["mooncake"], Tag(NAME)]
    | Annotated[RooflinePart, Tag("RooflinePart")]
    | Annotated[FittedPart, Tag("FittedPart")]
    | Annotated[SplitwisePart, Tag("SplitwisePart")]
    | Annotated[DistServePart, Tag("DistServePart")]
    | Annotated[MeasuredPart, Tag("MeasuredPart")],
    Discriminator(
        _kind,
        custom_error_type="no_such_cost",
        custom_error_message="must be mooncake, or hold hardware, splitwise, distserve, measured or prefill and decode",
    ),
]


def cost_model(cost: CostKey, shape: ModelShape) -> CostModel:
    """Raises ConfigError for a file that does not hold what is wanted."""
    return MOONCAKE if isinstance(cost, str) else cost.cost_model(shape)


def model_shape(model: ModelKey) -> ModelShape:
    return model.shape() if isinstance(model, ShapePart) else MODELS[model]
