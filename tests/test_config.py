"""Configuration: what a file may say, what is refused, and how an error mends."""

import dataclasses
import re
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest

from jzero.config import (
    Config,
    OptimizerConfig,
    PrecisionConfig,
    TrainConfig,
    default_schedule,
    load_config,
    optimizer_section,
    parse_config,
    profile_steps,
    schedule_section,
)
from jzero.rates import make_optimizer, make_schedule
from jzero.recipe import model_factory
from jzero.schedules import DEEPSPEED
from jzero.schema import NEEDS_MORE, find_optimizer, find_schedule, optimizers, own_arguments

CONFIGS = sorted((Path(__file__).parent.parent / "configs").glob("*.toml"))
NUM_PARAMS = {"124m": 124_439_808, "355m": 354_823_168, "774m": 774_030_080, "1558m": 1_557_611_200}

USER_MODULE = """
from typing import TYPE_CHECKING, Callable, Literal

class Model:
    def __init__(self, width: int, *, kind: Literal["a", "b"] = "a", rate=0.5,
                 sizes: tuple[int, ...] = (), hook: Callable | None = None, rngs=None):
        self.width, self.kind, self.rate, self.sizes = width, kind, rate, sizes

class Needy:
    def __init__(self, hook: Callable):
        pass

not_a_class = 3
"""

# What stands in x.toml; what the message must say: the value, and how to mend it.
REFUSED = [
    ("[zero]\nstge = 2", "x.toml: [zero] has no key 'stge'; did you mean 'stage'?"),
    ("[zreo]\nstage = 2", "x.toml: there is no section [zreo]; did you mean [zero]?"),
    ("[storage]\nevery = 2", "there is no section [storage]; the sections are model, opt"),
    ("stage = 2", "key 'stage' stands outside the sections; put it in [zero]."),
    ("frobs = 2", "key 'frobs' stands outside the sections; put it in a section, or leave"),
    ("[data]\nnum_steps = 2", "[data] has no key 'num_steps'; it belongs in [train]."),
    ("[mesh]\nxyzzy = 2", "[mesh] has no key 'xyzzy'; its keys are replica, data, model, num_cpu"),
    ("[zero]\nstage = '2'", "[zero] stage is '2', of type str; give it a value of type int."),
    ("[zero]\nstage = true", "[zero] stage is True, of type bool; give it a value of type int."),
    ("[zero]\nstage = 2.0", "[zero] stage is 2.0, of type float; give it a value of type int."),
    ("[zero]\nstage = 4", "[zero] stage is 4; use 0, 1, 2 or 3."),
    ("[zero]\nstage = -1", "[zero] stage is -1; use 0, 1, 2 or 3."),
    ("[zero]\naxes = 'data'", "[zero] axes is 'data', of type str; give it a value of type arr"),
    ("[zero]\naxes = [1]", "[zero] axes is [1], of type list; give it a value of type array of"),
    ("[optimizer]\nname = 'sgd'\nb2 = 0.9", "If sgd is meant, leave 'b2' out of the file."),
    ("[zero]\nkeep_gathered = true", "keep_gathered is True; it is for stage 3, not 2: leave it"),
    ("[zero]\ncut_layers = true", "[zero] cut_layers is True; it is for stage 1, not 2: leave it"),
    ("[precision]\npolicy = 'fp8'", "[precision] policy is 'fp8', of type str; give it a value of"),
    ("[precision]\nloss_scale = 'auto'", "loss_scale is 'auto'; use 'dynamic', a positive number"),
    ("[precision]\nmaster_dtype = 'int8'", "master_dtype is 'int8'; use one of float16"),
    ("[precision]\nmax_skips_in_a_row = 0", "max_skips_in_a_row is 0; use 1 or more."),
    ("[zero]\nmin_size = -1", "[zero] min_size is -1; use 0 or more."),
    ("[mesh]\ndata = 0", "[mesh] data is 0; use 1 or more."),
    ("[mesh]\nnum_cpu_devices = 0", "[mesh] num_cpu_devices is 0; use 1 or more."),
    ("[data]\nval_fraction = 1", "[data] val_fraction is 1.0; use a share between 0 and 1"),
    ("[data]\nseq_len = 0", "[data] seq_len is 0; use 1 or more."),
    ("[data]\nmax_bytes = 0", "[data] max_bytes is 0; use 1 or more."),
    ("[data]\nseed = -1", "[data] seed is -1; use 0 to 4294967295."),
    ("[train]\nnum_steps = 0", "[train] num_steps is 0; use 1 or more."),
    ("[train]\nmicro_batch = -3", "[train] micro_batch is -3; use 1 or more."),
    ("[train]\nnum_microbatches = 0", "[train] num_microbatches is 0; use 1 or more."),
    ("[train]\ntrain_batch_size = 0", "[train] train_batch_size is 0; use 1 or more."),
    ("[train]\neval_every = -1", "[train] eval_every is -1; use 0 or more."),
    ("[train]\nsample_temperature = -1", "[train] sample_temperature is -1.0; use 0 or more."),
    ("[train]\nprofile = '5:3'", "[train] profile is '5:3'; give A:B with 1 <= A <= B <= num_st"),
    ("[precision]\nreduce_dtype = 'f32'", "reduce_dtype is 'f32'; use one of float16, bfloat16"),
    ("[optimizer]\nname = 'adamww'", "'adamww', no optimizer of optax; did you mean 'adamw'"),
    ("[optimizer]\nname = 'clip'", "name is 'clip', no optimizer of optax; "),
    ("[optimizer]\nname = 'lbfgs'", "name is 'lbfgs', not for a run here: its line search calls"),
    ("[optimizer]\nname = 'sam'", "'sam', not for a run here: it takes gradients at moved param"),
    ("[optimizer]\nname = 'sophia'", "'sophia', not for a run here: it estimates the Hessian"),
    ("[optimizer]\nname = 'schedule_free'", "use schedule_free_adamw or schedule_free_sgd."),
    ("[optimizer]\nname = 'contrib.muon'", "write 'muon': plain names reach optax and optax.con"),
    ("[optimizer]\nname = 'scale_by_adam'", "'scale_by_adam', no optimizer of optax; did you"),
    ("[optimizer]\nbeta1 = 0.9", "[optimizer] has no key 'beta1'; "),
    ("[optimizer]\nname = 'sgd'\nb1 = 0.9", "[optimizer] has no key 'b1'; its keys are"),
    ("[optimizer]\nschedule = 'cosine'", "no key 'schedule'; there is a section [schedule] for"),
    ("[optimizer]\nwarmup_steps = 3", "[optimizer] has no key 'warmup_steps'; it belongs in [sch"),
    ("[optimizer]\nmin_learning_rate_ratio = 2", "has no key 'min_learning_rate_ratio'; "),
    ("[schedule]\nname = 'cosin'", "[schedule] name is 'cosin', no schedule; did you mean 'cosin"),
    ("[schedule]\nname = 'xyzzy'", "[schedule] name is 'xyzzy', no schedule; use one of LRRange"),
    ("[schedule]\nname = 3", "[schedule] name is 3, of type int; give it a value of type str."),
    ("[schedule]\nname = 'join_schedules'", "'join_schedules', which needs schedules, and TOML"),
    ("[schedule]\nwarmup_step = 3", "[schedule] has no key 'warmup_step'; did you mean 'warmup_s"),
    ("[schedule]\nlearning_rate = 3", "no key 'learning_rate'; it belongs in [optimizer]."),
    ("[schedule]\nnum_steps = 3", "[schedule] has no key 'num_steps'; it belongs in [train]."),
    ("[schedule]\nname = 'none'\nvalue = 1", "[schedule] has no key 'value'; "),
    ("[schedule]\nname = 'WarmupLR'\nwarmup_type = 'x'", "value of type 'log' or 'linear'."),
    ("[schedule]\nname = 'WarmupLR'\nwarmup_max = 1", "did you mean 'warmup_max_lr'?"),
    ("[schedule]\nname = 'OneCycle'\ncycle_min_lr = 1", "lacks 'cycle_max_lr', which OneCycle n"),
    ("[schedule]\nname = 'constant_schedule'", "[schedule] lacks 'value', which constant_schedul"),
    ("[schedule]\nname = 'piecewise_constant_schedule'\ninit_value = 1\n"
     "boundaries_and_scales = {x = 0.5}", "give it a value of type table of int to float."),
    ("[optimizer]\nlearning_rate = 0", "[optimizer] learning_rate is 0.0; use a number above 0."),
    ("[optimizer]\nclip_norm = -1", "[optimizer] clip_norm is -1.0; use 0 or more."),
    ("[optimizer]\nname = 'adam'\nweight_decay = 0.1", "adam has no masked one: use 0, or adamw."),
    ("[optimizer]\nname = 'novograd'\nweight_decay = 0.1", "novograd has no masked one: use 0"),
    ("[optimizer]\nname = 'adafactor'\nweight_decay = 0.1", "set weight_decay_rate instead."),
    ("[model]\ntarget = 'models.gpt2'", "[model] target 'models.gpt2' is not MODULE:NAME; write"),
    ("[model]\ntarget = 'models.gpt3:GPT2'", "models.gpt3 cannot be imported (No module named"),
    ("[model]\ntarget = 'models.gpt2:GTP2'", "models.gpt2 has no 'GTP2'; did you mean 'GPT2'?"),
    ("[model]\ntarget = 'user_module:not_a_class'", "user_module has no 'not_a_class'; "),
    ("[model]\ntarget = 3", "[model] target is 3, of type int; give it a value of type str."),
    ("[model]\nnum_layer = 3", "[model] has no key 'num_layer'; did you mean 'num_layers'?"),
    ("[model]\nnum_layers = 'x'", "[model] num_layers is 'x', of type str; give it a value of"),
    ("[model]\nparam_dtype = 'float32'", "has no key 'param_dtype'; it belongs in [precision]."),
    ("[model]\ntarget = 'user_module:Model'", "[model] lacks 'width', which user_module:Model"),
    ("[model]\ntarget = 'user_module:Model'\nwidth = 1\nkind = 'c'", "type 'a' or 'b'."),
    ("[model]\ntarget = 'user_module:Needy'", "TOML cannot give; give that argument a default."),
    ("[zero\n", "x.toml is not TOML: "),
]  # fmt: skip


@pytest.fixture
def user_module(tmp_path, monkeypatch):
    (tmp_path / "user_module.py").write_text(USER_MODULE)
    monkeypatch.syspath_prepend(tmp_path)


def write(folder: Path, text: str) -> Path:
    path = folder / "x.toml"
    path.write_text(textwrap.dedent(text))
    return path


@pytest.mark.usefixtures("user_module")
@pytest.mark.parametrize(("text", "message"), REFUSED, ids=[row[0] for row in REFUSED])
def test_what_a_file_may_not_say_is_refused_with_file_value_and_mend(tmp_path, text, message):
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        load_config(write(tmp_path, text))
    assert str(caught.value).startswith(str(tmp_path / "x.toml"))


def test_a_missing_file_is_refused_and_the_nearest_is_named(tmp_path):
    write(tmp_path, "")
    with pytest.raises(ValueError, match=r"xx\.toml' does not exist; did you mean .*/x\.toml\?"):
        load_config(tmp_path / "xx.toml")
    with pytest.raises(ValueError, match=r"does not exist; give the path of a \.toml file"):
        load_config(tmp_path / "elsewhere" / "y.toml")


def test_what_is_left_out_has_the_default_of_its_section(tmp_path):
    config = load_config(write(tmp_path, ""))
    assert config.train == dataclasses.replace(TrainConfig(), out_dir="runs/x")
    assert config.precision == PrecisionConfig()
    assert own_arguments(config.model)["num_layers"] == 12
    assert isinstance(config, Config)


def test_values_have_the_types_of_their_keys(tmp_path):
    text = """
        [optimizer]
        learning_rate = 1
        mu_dtype = "bfloat16"
        [zero]
        axes = ["replica", "data"]
        [model]
        loss_chunk = 8
        dropout = 0
    """
    config = load_config(write(tmp_path, text))
    assert type(config.optimizer.learning_rate) is float
    assert own_arguments(config.optimizer)["mu_dtype"] == "bfloat16"
    assert config.zero.axes == ("replica", "data")
    assert own_arguments(config.model)["loss_chunk"] == 8
    assert type(own_arguments(config.model)["dropout"]) is float


def test_a_configuration_cannot_be_changed():
    config = parse_config({})
    for part in (config, config.model, config.optimizer, config.zero):
        with pytest.raises(dataclasses.FrozenInstanceError):
            part.seed = 1  # type: ignore


@pytest.mark.usefixtures("user_module")
def test_a_model_of_the_users_has_its_own_arguments():
    table = {"target": "user_module:Model", "width": 3, "rate": 0.25, "sizes": [1, 2]}
    config = parse_config({"model": table})
    model = model_factory(config.model, config.precision)(None)
    assert (model.width, model.kind, model.rate, model.sizes) == (3, "a", 0.25, (1, 2))
    assert "hook" not in own_arguments(config.model)  # not for TOML: it keeps its default


@pytest.mark.usefixtures("user_module")
def test_a_dtype_for_a_model_without_that_argument_is_refused():
    table = {"model": {"target": "user_module:Model", "width": 3}}
    config = parse_config(table | {"precision": {"compute_dtype": "bfloat16"}})
    with pytest.raises(ValueError, match=r"sets compute_dtype 'bfloat16', but user_module:Model"):
        model_factory(config.model, config.precision)


@pytest.mark.parametrize("name", ["adamw", "sgd", "adafactor", "lion", "lamb", "rmsprop", "sm3"])
def test_an_optimizer_has_ours_and_its_own_arguments(name):
    kind = optimizer_section(name)
    assert issubclass(kind, OptimizerConfig)
    own = own_arguments(kind(name=name))
    assert "learning_rate" not in own
    assert "mask" not in own
    given = {key: value for key, value in own.items() if value is not None}
    find_optimizer(name)(learning_rate=0.1, **given)


@pytest.mark.filterwarnings("ignore:.*optimistic_adam.*deprecated:DeprecationWarning")
@pytest.mark.parametrize("name", sorted(optimizers()))
def test_every_optimizer_of_optax_and_contrib_is_made_from_its_name_alone(name):
    tables: dict = {"optimizer": {"name": name}}
    if name == "noisy_sgd":
        tables["optimizer"]["key"] = 0
    config = parse_config(tables)
    tx = make_optimizer(config.optimizer, make_schedule(config))
    assert isinstance(tx, optax.GradientTransformation)
    params = {"fc": {"weight": jnp.ones((3, 2))}, "ln": {"weight": jnp.ones(3)}}

    def step(params):
        tx_ = optax.with_extra_args_support(tx)
        return tx_.update(params, tx_.init(params), params, value=1.0)[0]  # gradients and a value

    assert jax.tree.structure(jax.eval_shape(step, params)) == jax.tree.structure(params)


def test_optimizers_are_found_by_inspection_and_what_needs_more_is_not_among_them():
    found = optimizers()
    for name in ("adabelief", "adadelta", "adan", "lars", "noisy_sgd", "yogi", "polyak_sgd"):
        assert found[name] is find_optimizer(name) is getattr(optax, name)
    for name in ("muon", "prodigy", "dog", "cocob", "dadapt_adamw", "momo", "schedule_free_sgd"):
        assert found[name] is find_optimizer(name) is getattr(optax.contrib, name)
    assert not found.keys() & NEEDS_MORE.keys()
    functions = vars(optax) | vars(optax.contrib)
    assert all(name in functions for name in NEEDS_MORE)


@pytest.mark.parametrize(
    ("optimizer", "schedule"),
    [("adamw", "cosine"), ("muon", "cosine"), ("rprop", "constant"), ("sm3", "constant"),
     ("schedule_free_adamw", "constant"), ("polyak_sgd", "none")],
)  # fmt: skip
def test_the_schedule_left_out_is_one_that_the_optimizer_takes(optimizer, schedule):
    assert parse_config({"optimizer": {"name": optimizer}}).schedule.name == schedule
    assert default_schedule(optimizer) == schedule


def test_every_schedule_of_optax_has_a_section_but_join_schedules():
    names = {k for k in vars(optax.schedules) if k.endswith(("_schedule", "_decay"))}
    names = {name for name in names if name[0] != "_"}
    assert len(names) >= 13
    for name in names:
        assert find_schedule(name) is getattr(optax.schedules, name)
        schedule_section(name)


@pytest.mark.parametrize("deepspeeds", sorted(DEEPSPEED))
def test_a_schedule_of_deepspeeds_has_both_spellings(deepspeeds):
    ours = DEEPSPEED[deepspeeds].__name__
    assert find_schedule(ours) is find_schedule(deepspeeds) is DEEPSPEED[deepspeeds]
    names = [[f.name for f in dataclasses.fields(schedule_section(x))] for x in (ours, deepspeeds)]
    assert names[0] == names[1]


def test_tables_of_steps_and_arrays_of_tables_reach_a_schedule(tmp_path):
    text = """
        [schedule]
        name = "piecewise_constant_schedule"
        init_value = 1
        boundaries_and_scales = { 100 = 0.5, 200 = 0.1 }
    """
    own = own_arguments(load_config(write(tmp_path, text)).schedule)
    assert own == {"init_value": 1.0, "boundaries_and_scales": {100: 0.5, 200: 0.1}}
    text = """
        [schedule]
        name = "sgdr_schedule"
        [[schedule.cosine_kwargs]]
        init_value = 0
        peak_value = 1
        warmup_steps = 2
        decay_steps = 6
        end_value = 0
        [train]
        num_steps = 6
    """
    config = load_config(write(tmp_path, text))
    assert own_arguments(config.schedule)["cosine_kwargs"][0]["peak_value"] == 1.0
    assert float(make_schedule(config)(2)) == 1.0


@pytest.mark.parametrize("profile", ["3", "0:2", "2:1", "2:11", "a:b", "1:2:3", "-1:2"])
def test_a_profile_that_is_no_range_of_steps_is_refused(profile):
    with pytest.raises(ValueError, match=r"give A:B with 1 <= A <= B <= num_steps 10"):
        profile_steps(profile, 10)


@pytest.mark.parametrize("path", CONFIGS, ids=[path.stem for path in CONFIGS])
def test_every_config_of_the_repository_loads_and_says_how_it_is_run(path):
    config = load_config(path)
    assert config.train.out_dir == f"runs/{path.stem}"
    header = re.match(r"(#.*\n)+", path.read_text())
    assert header is not None
    for word in ("Purpose", "Hardware", "Expected", f"jzero train configs/{path.name}"):
        assert word in header[0]


def test_the_repository_has_the_four_sizes_the_demo_and_three_models_to_plan():
    planned = {"megatron_8b", "turing_nlg_17b", "zero_100b"}
    sizes = {f"gpt2_{k}" for k in NUM_PARAMS}
    assert {path.stem for path in CONFIGS} == {"gpt2_demo", *sizes, *planned}
