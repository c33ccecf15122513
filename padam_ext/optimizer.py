"""FusedPadam: a thin torch.optim.Optimizer over the backends."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial as bind
from typing import Any, TypeVar, overload

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT, StateDict

from padam_ext import checkpoint, choice, driver, runtime
from padam_ext.checks import Name, check_param
from padam_ext.control import ControlInputs, check_scalar_tensor
from padam_ext.conversion import joined, unpacked
from padam_ext.distributed.grad_scaler import calling_scaler, check_sees_all, tell_scaler
from padam_ext.distributed.plain_shards import check_norm_groups
from padam_ext.distributed.reduction import NormGroups, Reduction, Reductions, replicated_in
from padam_ext.gather import Selection, StepInputs
from padam_ext.optimizer_options import (
    OPTIMIZER_DEFAULTS,
    check_has_none_of_its_own,
    check_ignored_options,
    check_optimizer_options,
)
from padam_ext.options import DEFAULTS, Hyperparameters, make_plain
from padam_ext.param_index import ParamIndex
from padam_ext.plan import ALL_PARAMS, Needs, Planner, all_params
from padam_ext.precision import check_precision
from padam_ext.state import Sight, fit_state

_Function = TypeVar("_Function", bound=Callable[..., Any])


def _untraced(function: _Function) -> _Function:
    """Excludes a step from torch.compile.

    Kernels receive raw addresses, so the compiler cannot see their writes.
    """
    # torch.compiler.disable is the public name; it imports the compiler, which takes seconds.
    disable: Any = torch._disable_dynamo  # type: ignore[attr-defined]
    wrapped: _Function = disable(function)
    return wrapped


class FusedPadam(Optimizer):
    """Padam, the partially adaptive momentum method, fused over all parameters.

    For each element, with states m, v and h starting at zero (Algorithm 1 of Chen et al., "Closing
    the Generalization Gap of Adaptive Gradient Methods in Training Deep Neural Networks", IJCAI
    2020)::

        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * g**2
        h = max(h, v)
        x = x - lr * c * m / (sqrt(h) / r + eps) ** (2 * p)

    p = 1/2 is AMSGrad; p = 0 is SGD with momentum at a learning rate scaled by (1 - b1).

    Parameters may be float32, float64, bfloat16, float16 or complex, of any dense or strided
    layout, on several devices. Arithmetic and states are float32 for half types and in the
    parameter's precision otherwise. States carry the names of torch.optim.Adam: `step`, `exp_avg`,
    `exp_avg_sq`, `max_exp_avg_sq`.

    Args:
        params: parameters, named parameters or dicts of param groups, as for torch.optim. All
            options below from `lr` to `second_moment` may differ between groups.
        lr: learning rate, a float or a tensor of one element. The paper's base learning rate for
            image classification is 0.1, as for SGD.
        betas: decay of the first and the second moment, each in [0, 1).
        eps: added to the root of the second moment, inside the power. 0 gives the paper's formula
            exactly; an element with h = m = 0 then stays where it is.
        weight_decay: L2 penalty added to the gradient, or decoupled, see below.
        partial: the paper's p, in [0, 1/2]. The authors' class defaults to 1/4, their command line
            and their README to 1/8.
        amsgrad: whether to keep the running maximum h. False uses v in its place.
        bias_correction: how the moments are debiased, by factors c and r at update number t:

            - "none", the paper: c = r = 1.
            - "authors", the authors' released code: c = sqrt(1 - b2**t) / (1 - b1**t), r = 1. For
              p < 1/2 this is not a debiasing but a warm-up: with the default betas the factor is
              0.316 at t = 1, 0.152 at t = 12 and 0.795 at t = 1000.
            - "adam": c = 1 / (1 - b1**t), r = sqrt(1 - b2**t), the debiasing that is consistent at
              every p and equals torch.optim.Adam(amsgrad=True) at p = 1/2.
        decoupled_weight_decay: multiply x by 1 - lr * weight_decay first, as AdamW does, instead
            of adding weight_decay * x to the gradient.
        maximize: ascend instead of descend.
        state_dtype: "packed32" keeps all moments of an element in one int32, 4 bytes of state for
            12, for float32, bfloat16 and float16 parameters. The state is then `packed_mvh`, or
            `packed_mv` without amsgrad; `unpacked_state` reads it.
        param_rounding: "stochastic" rounds bfloat16 parameters up or down at random, right on
            average. To the nearest, a step below half a unit of bfloat16 is lost: small steps do
            not move the parameter at all.
        master: "split" keeps the lower 16 bits of bfloat16 parameters as `param_low`, int16: the
            parameter and they are a float32, which is what is stepped. It begins at the bfloat16
            value.
        seed: of all random numbers, an integer of 32 bits. They depend on it, the step count, the
            parameter's position among all and the element's in memory, and on nothing else.
        second_moment: how v follows from g. "mean", see above; AdaGrad's "sum", v = v + g**2;
            "max", v = max(b2**2 * v, g**2), the square of AdaMax's infinity norm; or "yogi",
            v = v - (1 - b2) * sign(v - g**2) * g**2. All but "mean" need amsgrad=False and no bias
            correction.
        max_grad_norm: clip all gradients together to this norm, as
            `torch.nn.utils.clip_grad_norm_` does over all parameters, but without writing to them.
            `grad_norm` holds the norm before clipping.
        skip_nonfinite: skip the step, and do not count it, if the norm is infinite or NaN.
        norm_group: a torch.distributed.ProcessGroup, or several in a list, whose processes hold
            other parts of the model as plain tensors: FSDP1, ZeRO, tensor or pipeline parallelism
            by hand. The norm, and what GradScaler finds, then add up over them. Parameters that
            are the same in all of them go into a param group with `"replicated": True`, or with
            the indices of the groups in which they are. DTensors need no norm_group.
        unscale_grads: whether a step under GradScaler unscales gradients itself. With False the
            scaler does so first, and leaves out steps with an infinity, as for optimizers that are
            not fused: the host waits for the GPU then.
        capturable: allow steps to be captured into CUDA graphs. Step counters are then kept on
            the GPU. A learning rate or weight decay that is to change between replays must be a
            tensor on the GPU.
        backend: "auto" takes the best backend for each device; a name from
            `padam_ext.available_backends()` insists on that one.
        foreach: None, True or False, without effect. For code that passes it to any optimizer of
            torch.optim, as `fused` is.
        fused: likewise; every step is fused.
        differentiable: False only: a step cannot be differentiated.

    Attributes:
        grad_norm: norm of all gradients in the last step, before clipping: a tensor of one element
            on the parameters' device. None without `max_grad_norm` and `skip_nonfinite`.

    Raises:
        ValueError: an option outside its range; a duplicate, non-leaf or expanded parameter.
        TypeError: an option of the wrong type. Messages name the option and show the value.
        RuntimeError: a backend asked for by name that cannot run on this machine.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = FusedPadam(model.parameters(), lr=0.1, weight_decay=5e-4)
        >>> model(torch.randn(8, 4)).square().mean().backward()
        >>> optimizer.step()
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 0.1,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        partial: float = 0.125,
        *,
        amsgrad: bool = True,
        bias_correction: str = "none",
        decoupled_weight_decay: bool = False,
        maximize: bool = False,
        state_dtype: str = "float32",
        param_rounding: str = "nearest",
        master: str | None = None,
        seed: int = 0,
        second_moment: str = "mean",
        max_grad_norm: float | None = None,
        skip_nonfinite: bool = False,
        norm_group: Any = None,
        unscale_grads: bool = True,
        capturable: bool = False,
        backend: str = "auto",
        foreach: bool | None = None,
        fused: bool | None = None,
        differentiable: bool = False,
    ) -> None:
        check_ignored_options(
            {"foreach": foreach, "fused": fused, "differentiable": differentiable}
        )
        self.backend = backend
        self.max_grad_norm = max_grad_norm
        self.skip_nonfinite = skip_nonfinite
        self.norm_group = norm_group
        self.unscale_grads = unscale_grads
        self.capturable = capturable
        check_optimizer_options(self)
        self._start_afresh()
        defaults: dict[str, Any] = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "partial": partial,
            "amsgrad": amsgrad,
            "bias_correction": bias_correction,
            "decoupled_weight_decay": decoupled_weight_decay,
            "maximize": maximize,
            "state_dtype": state_dtype,
            "param_rounding": param_rounding,
            "master": master,
            "seed": seed,
            "second_moment": second_moment,
        }
        make_plain(defaults, check_lr_sign=True)
        super().__init__(params, defaults)

    def _start_afresh(self) -> None:
        planner = self.__dict__.get("_planner")
        if planner is None:
            self._planner = Planner()
        else:
            planner.forget()
        self._param_index = ParamIndex()
        self._reductions = Reductions()
        self._sight = Sight()
        self._looked_for_shards = False
        self.grad_norm: Tensor | None = None
        self._skipped: dict[torch.device, Tensor] = {}

    @property
    def backend(self) -> str:
        """The name of the backend, or "auto". Setting another takes effect at the next step."""
        return self._backend

    @backend.setter
    def backend(self, name: str) -> None:
        choice.check_name(name)
        self._backend = name

    @property
    def norm_group(self) -> Any:
        """As given to the constructor. Setting another takes effect at the next step."""
        return self._norm_groups.value

    @norm_group.setter
    def norm_group(self, value: Any) -> None:
        self._norm_groups = NormGroups(value)
        self._looked_for_shards = False

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """GradScaler asks for this: whether it leaves unscaling and skipping to `step`."""
        return self.unscale_grads

    @property
    def skipped_steps(self) -> Tensor:
        """How many steps `skip_nonfinite` or GradScaler has skipped, as a tensor of one element.

        Counts from when the optimizer was made, or last loaded a state_dict.
        """
        if not self._skipped:
            return torch.zeros((), dtype=torch.int64, device="cpu")
        first, *others = self._skipped.values()  # of each device that has found out
        return sum((runtime.moved_to(other, first.device) for other in others), first.clone())

    @property
    def state(self) -> defaultdict[Tensor, Any]:
        """State of each parameter by the names of torch.optim.Adam.

        Code that has read this property may replace tensors in it at any time, so later steps
        check for that. Loading a state_dict makes new tensors and ends these checks.
        """
        self._sight.seen = True
        state: defaultdict[Tensor, Any] = self.__dict__["state"]
        return state

    @state.setter
    def state(self, state: defaultdict[Tensor, Any]) -> None:
        # The base class assigns the first one, and keeps it to itself.
        self._sight.seen = "state" in self.__dict__
        self.__dict__["state"] = state
        # What was prepared holds addresses of the old states.
        self._planner.forget()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a param group, as torch.optim.Optimizer does, after checking it.

        Raises:
            ValueError: see the class; nothing has been added then.
            TypeError: see the class.
        """
        if isinstance(param_group, dict) and isinstance(param_group["params"], Iterable):
            check_has_none_of_its_own(param_group, self)
            if not isinstance(param_group["params"], Tensor | set):
                param_group["params"] = list(param_group["params"])
                _check_unique(param_group["params"])
        super().add_param_group(param_group)
        self._looked_for_shards = False
        group = self.param_groups[-1]
        try:
            check_ignored_options(group)
            if self._norm_groups.groups:
                replicated_in(group, len(self._norm_groups.groups))
            make_plain(group, check_lr_sign=True)
            names = group.get("param_names", range(len(group["params"])))
            for param, name in zip(group["params"], names, strict=True):
                check_param(param, f"parameter {name!r}")
                check_precision(param, group, f"parameter {name!r}")
        except Exception:
            self.param_groups.pop()
            raise

    def init_state(self) -> None:
        """Makes the state of each parameter that has none: moments of zero, `step` 0.

        A step makes what is missing itself; this is for code that needs the tensors before, as a
        checkpoint that is to be loaded in place does. Parameters that require no gradient and lazy
        ones are left out.
        """
        state = self.__dict__["state"]
        for position, (param, group) in enumerate(self._params_and_groups()):
            if param.requires_grad and not is_lazy(param) and not state.get(param):
                check_precision(param, group, Name(self.param_groups, param))
                fit_state(state[param], param, group, position, may_replace=True)

    def unpacked_state(self, param: Tensor) -> dict[str, Tensor]:
        """The moments of a parameter as copies by the names of torch.optim.Adam.

        Those of packed states are float32; there is a `max_exp_avg_sq` with amsgrad. With
        `master="split"` there is the float32 parameter as well, by the name `param`.

        Args:
            param: one of this optimizer's that has a state.

        Raises:
            KeyError: it has none.
        """
        state = self.__dict__["state"]
        if param not in state:  # asking for it would make one
            raise KeyError(
                "unpacked_state: the parameter has no state yet; make a step or call init_state()"
            )
        values = unpacked(state[param])
        if "param_low" in state[param]:
            values["param"] = joined(param, state[param]["param_low"])
        return values

    def _params_and_groups(self) -> Iterator[tuple[Tensor, dict[str, Any]]]:
        for group in self.param_groups:
            for param in group["params"]:
                yield param, group

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Loads the optimizer's state, exactly, as copies.

        Takes files of FusedPadam, of torch.optim.Adam and AdamW, and of the authors' Padam, whose
        `step` is a Python int. Options that a file does not have (`partial`, for torch.optim's)
        keep their present values. Where `max_exp_avg_sq` is missing although the file's group
        says amsgrad, the running maximum starts at the file's `exp_avg_sq`.

        Raises:
            ValueError: the file does not fit these parameters, or has an option outside its range.
            TypeError: an option or state of the wrong type. Nothing has been loaded then.
        """
        # Registered here, so that they run after and before all hooks that the user registered.
        handles = (
            self.register_load_state_dict_pre_hook(checkpoint.check_and_wrap),
            self.register_load_state_dict_post_hook(_hide_state, prepend=True),
        )
        try:
            super().load_state_dict(state_dict)
        finally:
            for handle in handles:
                handle.remove()

    def state_dict(self) -> StateDict:
        """The optimizer's state in torch.optim.Adam's layout, its options as plain numbers.

        `torch.load(weights_only=True)` reads such a file, whatever number type a scheduler set.
        """
        state_dict: StateDict = super().state_dict()
        for group in state_dict["param_groups"]:
            make_plain(group, check_lr_sign=False)
            for name in checkpoint.OPTIONS_OF_THIS_RUN:
                group.pop(name, None)
        return state_dict

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and deepcopy: what torch.optim keeps, and what OPTIMIZER_DEFAULTS names."""
        mine = {name: getattr(self, name) for name in OPTIMIZER_DEFAULTS if name != "norm_group"}
        return {**super().__getstate__(), **mine, "_norm_groups": self._norm_groups}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """From pickle, deepcopy and load_state_dict; plans are made anew."""
        # This also works where that backend cannot run; the next step then says why.
        self._backend = state.get("backend", self.__dict__.get("_backend", "auto"))
        self.__dict__.setdefault("unscale_grads", True)  # pickled by 0.1
        self.__dict__.setdefault("_norm_groups", NormGroups(None))
        super().__setstate__({key: value for key, value in state.items() if key != "backend"})
        self._start_afresh()
        self._sight.seen = True  # a copy of the optimizer may share it
        for options in (self.defaults, *self.param_groups):
            for name, value in DEFAULTS.items():
                options.setdefault(name, value)  # pickled before there was that option
        states = self.__dict__["state"]
        for position, (param, group) in enumerate(self._params_and_groups()):
            if param in states:
                checkpoint.unwrap(states[param], param, group, position)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @_untraced
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Makes one step. Gradients are only read.

        Under torch.amp.GradScaler the kernels unscale the gradients, and skip the step if any is
        not finite. The host does not wait for the GPU, except on the eager backend.

        Args:
            closure: evaluates the model again and returns the loss, as for torch.optim.

        Returns:
            The closure's loss, or None without a closure.

        Raises:
            RuntimeError: a sparse gradient, or a backend that cannot take the tensors.
            TypeError: a tensor of a dtype or subclass that cannot be stepped.
            ValueError: an option that was set outside its range. In each of these cases no
                parameter and no state has changed.
        """
        if not self.__dict__["state"] and checkpoint.only_makes_states():
            self.init_state()
            return None
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()

        try:
            self._step(all_params(self.param_groups), keep_as=ALL_PARAMS)
        except BaseException:
            self._drop_grad_scaler()
            raise
        return loss

    def step_param(self, param: Tensor) -> None:
        """Makes the step of one parameter. See `step_params`."""
        self.step_params([param])

    @_untraced
    @torch.no_grad()
    def step_params(self, params: Sequence[Tensor]) -> None:
        """Steps some parameters as `step` would. Those without a gradient are left as they are.

        For stepping during backward, see `step_during_backward`. Step hooks do not run.

        Args:
            params: some of this optimizer's parameters, each once.

        Raises:
            ValueError: a parameter is in no param group or given twice, or an option outside its
                range.
            RuntimeError: max_grad_norm or skip_nonfinite is set, which need all gradients; and see
                `step`.
            TypeError: something else than parameters; and see `step`.
        """
        self._refuse_norm("step_params")
        selection = self._param_index.select(params, self.param_groups)
        # A plan for each parameter would take more memory than its state; only a capture needs one.
        keep_as = id(params[0]) if self.capturable and params else None
        self._step(selection, keep_as=keep_as)

    def _drop_grad_scaler(self) -> bool:
        """Drops what GradScaler set for a step; whether there was anything.

        It does so itself after a step, but not after one that fails. What is left would unscale
        gradients that nobody scaled.
        """
        left = [self.__dict__.pop(name, None) for name in ("grad_scale", "found_inf")]
        return any(value is not None for value in left)

    def _refuse_norm(self, caller: str) -> None:
        """Raises RuntimeError where the norm of all gradients plays a part."""
        if ControlInputs(None, None, self.max_grad_norm, self.skip_nonfinite).needs_norm:
            raise RuntimeError(
                f"{caller} cannot be used with max_grad_norm={self.max_grad_norm!r} and "
                f"skip_nonfinite={self.skip_nonfinite!r}: they need all gradients at once"
            )

    def _has_param(self, param: Tensor) -> bool:
        return self._param_index.has(param, self.param_groups)

    def _step(self, selection: Selection, *, keep_as: object) -> None:
        check_optimizer_options(self)
        if runtime.capturing() and not self.capturable:
            raise RuntimeError(
                "a step of FusedPadam is being captured into a CUDA graph: make the optimizer with "
                "capturable=True"
            )
        for index, _ in selection:
            check_has_none_of_its_own(self.param_groups[index], self)
        options = {
            index: Hyperparameters.from_group(
                self.param_groups[index], keep_tensors=self.capturable
            )
            for index, _ in selection
        }
        inputs = self._planner.gather(selection, self.__dict__["state"])
        control, reduction = self._control_inputs(inputs)
        needs = Needs(
            self.backend,
            control.may_skip,
            self.capturable,
            reduction if control.needs_norm else None,
            self._sight.seen,
        )
        steps = self._planner.plan(
            inputs, self.param_groups, bind(choice.choose, self.backend), needs, keep_as=keep_as
        )
        outcome = driver.make_step(steps, inputs, options, control, self._skipped, reduction)
        self.grad_norm = outcome.norm
        self._skipped = outcome.skipped
        if runtime.capturing():
            self._planner.keep_captured(self._skipped, outcome.norm)
        if reduction is not None and outcome.found_inf is not None:
            scaler = calling_scaler(self)
            if scaler is not None:
                tell_scaler(scaler, self, outcome.found_inf)

    def _control_inputs(self, inputs: StepInputs) -> tuple[ControlInputs, Reduction | None]:
        """What a step is to do with all gradients, and over which processes it asks."""
        # GradScaler sets these only during a step, `found_inf` in every one.
        grad_scale, found_inf = (getattr(self, name, None) for name in ("grad_scale", "found_inf"))
        control = ControlInputs(
            check_scalar_tensor("grad_scale", grad_scale),
            check_scalar_tensor("found_inf", found_inf, or_zero=True),
            self.max_grad_norm,
            self.skip_nonfinite,
        )
        if self._norm_groups.groups and not self.unscale_grads:
            check_sees_all(calling_scaler(self))
        if not control.needs_norm and found_inf is None:
            return control, None
        if not self._looked_for_shards:
            check_norm_groups(self, self._norm_groups)
            self._looked_for_shards = True
        reduction = self._reductions.find(self.param_groups, self._norm_groups, inputs.reading)
        if reduction is not None and found_inf is not None and control.found_inf is None:
            # This process has no gradients, others may.
            control = control._replace(found_inf=torch.zeros((), device=reduction.device))
        return control, reduction


def _hide_state(optimizer: Any) -> None:
    """After loading: all states were made there."""
    optimizer._sight.seen = False


def _check_unique(params: Iterable[Any]) -> None:
    seen: set[int] = set()
    for index, item in enumerate(params):
        name, param = item if isinstance(item, tuple) else (index, item)
        if id(param) in seen:
            raise ValueError(f"parameter {name!r} appears more than once in a param group")
        seen.add(id(param))
