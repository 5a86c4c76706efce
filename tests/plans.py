"""Plans as `jzero plan` would make them, without a compile: GPT-2 1558M, a failure, a trillion."""

import dataclasses

from jzero.formula import state_bytes
from jzero.plan_figures import FORMULA, GIVEN, Figure, Plan, Sent, StagePlan
from jzero.timing import PASSES, law

PSI, GIB = 1_557_611_200, 2**30
KILLED = """\
the compile was killed by signal 6 (SIGABRT); its last words:
F0000 gpu_compiler.cc:1321] Check failed: size mismatch when packing elements [64] vs [8]
    @ 0x7f3a1c2b xla::gpu::GpuCompiler::RunBackend(xla::HloModule const&, stream_executor)"""


def figures(num_shards, stage, capacity_bytes, micro_batch=8):
    """Figures of one stage of GPT-2 1558M in bf16 with a float32 master, roughly."""
    mine = state_bytes(PSI, num_shards=num_shards, stage=stage)
    grads, logits = mine.grads, micro_batch * 1024 * 50304 * 6
    temp = grads + logits + micro_batch * 1024 * 1600 * 2 * 60 + 0.4 * GIB
    rest = mine.params + mine.optimizer
    tokens = num_shards * micro_batch * 1024
    flops = tokens * (6 * PSI + 12 * 48 * 1600 * 1024)
    compute = flops / num_shards / 400e12
    comm, covered = (0.018, 0.018, 0.018, 0.0265)[stage], (0.77, 0.84, 0.88, 0.957)[stage]
    step = compute + comm * (1 - covered)
    estimates = {
        "flops": flops,
        "compute_s": compute,
        "comm_s": comm,
        "exposed_s": comm * (1 - covered),
        "step_s": step,
        "tokens_per_s": tokens / step,
        "mfu": flops / num_shards / step / 989.4e12,
        "hours": 100e9 / (tokens / step) / 3600,
    }
    return {
        "params_bytes": Figure(mine.params),
        "master_bytes": Figure(mine.optimizer / 3),
        "state_bytes": Figure(mine.optimizer / 3 * 2),
        "temp_bytes": Figure(temp),
        "grads_bytes": Figure(grads, FORMULA),
        "logits_bytes": Figure(logits, FORMULA),
        "peak_bytes": Figure(rest + temp),
        "capacity_bytes": Figure(capacity_bytes, GIVEN),
        "micro_batch": Figure(micro_batch, GIVEN),
        "max_micro_batch": Figure(max((capacity_bytes - rest) // (temp / micro_batch), 0)),
        **{key: Figure(value, FORMULA) for key, value in estimates.items()},
        "covered": Figure(covered),
    }


def sent(num_shards, stage):
    """What GPT-2 1558M sends in one stage."""
    one = 2 * PSI * (num_shards - 1) / num_shards
    scalar = Sent("all_reduce", "f32", "data", 2, 8.0, 0.0)
    if stage == 0:
        return (Sent("all_reduce", "bf16", "data", 49, 2 * one, 0.77), scalar)
    gathers = Sent(
        "all_gather", "bf16", "data", 49 * (1 + stage // 3), one * (1, 1, 1.95)[stage - 1]
    )
    return (Sent("reduce_scatter", "bf16", "data", 49, one, 0.9), gathers, scalar)


def gpt2_plan(num_shards=64, capacity_bytes=79.1 * GIB, stages=(0, 1, 2, 3), micro_batch=8):
    """GPT-2 1558M; on 64 H100s every stage fits."""
    found = (
        StagePlan(i, figures(num_shards, i, capacity_bytes, micro_batch), sent(num_shards, i))
        for i in stages
    )
    notes = (
        "Attention is planned as flash attention keeps it: no T x T scores.",
        "Outside of all figures: the CUDA context, NCCL's buffers and fragmentation, about 1 GiB.",
    )
    title = f"GPT2, 1.6B parameters on {num_shards} x h100-sxm"
    return Plan(title, notes, tuple(found), {"gpu": "h100-sxm", "num_gpus": num_shards})


def with_failure(plan, stage, failure=KILLED):
    """The plan with a stage whose compile failed, of which only formulas are known."""
    kept = {"capacity_bytes", "micro_batch", "flops"}
    failed = (
        StagePlan(x.stage, {k: f for k, f in x.figures.items() if k in kept}, (), failure)
        if x.stage == stage
        else x
        for x in plan.stages
    )
    return dataclasses.replace(plan, stages=tuple(failed))


def trillion_plan(num_shards=1024, capacity_bytes=31.7 * GIB):
    """A trillion parameters, from formulas alone."""
    stages = []
    for stage in range(4):
        mine = state_bytes(1e12, num_shards=num_shards, stage=stage)
        total = sum(PASSES[row.kind] * row.payload_bytes for row in law(stage, 1e12))
        found = {
            "params_bytes": Figure(mine.params, FORMULA),
            "state_bytes": Figure(mine.optimizer, FORMULA),
            "grads_bytes": Figure(mine.grads, FORMULA),
            "peak_bytes": Figure(mine.total, FORMULA),
            "capacity_bytes": Figure(capacity_bytes, GIVEN),
            "wire_bytes": Figure(total, FORMULA),
        }
        stages.append(StagePlan(stage, found))
    return Plan("1.0T parameters on 1024 x v100-sxm2-32gb", ("Model states alone.",), tuple(stages))
