"""Which packages' kernels are used: by what works on the device, not by what is installed."""

import os
import sys

import megatron.core.optimizer as optimizer
import megatron.core.optimizer.optimizer as mixed
import megatron.core.transformer.transformer_block as transformer_block
import megatron.core.utils as utils
import pytest
import torch
from megatron.core.optimizer import clip_grads
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from torch._subclasses.fake_tensor import FakeTensorMode

from hybridflow.models import gpt
from hybridflow.models.norm import RmsNorm
from hybridflow.parallel import accelerators, cpu
from hybridflow.parallel.deterministic import add_in_fixed_order


@pytest.fixture
def install(tmp_path, monkeypatch):
    """A function that installs a Transformer Engine of some version, whose import runs some code, beside a GPU."""

    def make(version, code=""):
        package = tmp_path / "transformer_engine/pytorch"
        package.mkdir(parents=True)
        (package.parent / "__init__.py").touch()
        (package / "__init__.py").write_text(code)
        about = tmp_path / f"transformer_engine-{version}.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: transformer-engine\nVersion: {version}\n")
        monkeypatch.syspath_prepend(tmp_path)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    accelerators.has_transformer_engine.cache_clear()
    yield make
    accelerators.has_transformer_engine.cache_clear()
    for name in [name for name in sys.modules if name.startswith("transformer_engine")]:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("version", "code", "fault"),
    [
        ("2.9.0+70f5366", "", ""),
        ("2.11.1", "", ""),
        ("2.12.0", "", "megatron-core needs >=2.9,<2.12"),
        ("1.13.0", "", "megatron-core needs >=2.9,<2.12"),
        ("2.10.0", "raise OSError('no libcudnn.so.9')", "it cannot be imported: OSError: no libcudnn.so.9"),
    ],
)
def test_transformer_engine_is_used_if_it_works_and_fits(install, version, code, fault):
    install(version, code)
    assert accelerators.transformer_engine_fault() == fault
    assert accelerators.has_transformer_engine() == (not fault)


def test_a_cpu_steps_with_torch_whatever_is_installed(monkeypatch):
    for module, name in ((optimizer, "Adam"), (clip_grads, "l2_norm_impl"), (clip_grads, "multi_tensor_applier")):
        monkeypatch.setattr(module, name, "needs a GPU")
    monkeypatch.setattr(optimizer, "USING_PYTORCH_OPTIMIZER", False)
    cpu.use_cpu_for_cuda.__wrapped__()
    assert optimizer.USING_PYTORCH_OPTIMIZER
    assert "needs a GPU" not in (optimizer.Adam, clip_grads.l2_norm_impl, clip_grads.multi_tensor_applier)


@pytest.fixture
def gpu_optimizer(monkeypatch):
    """An AdamW as on a GPU without Transformer Engine and Apex, and one as on a CPU, of equal parameters."""
    monkeypatch.setattr(clip_grads, "l2_norm_impl", utils.local_multi_tensor_l2_norm)
    for module in (clip_grads, mixed):
        monkeypatch.setattr(module, "multi_tensor_scale_impl", utils.local_multi_tensor_scale)
    values = [torch.arange(6.0).view(2, 3), torch.ones(4)]
    found = [torch.optim.AdamW([torch.nn.Parameter(each.clone()) for each in values], lr=0.1) for _ in range(2)]
    accelerators.use_gpu_optimizer(found[:1])
    return found


def test_a_gpu_steps_in_one_kernel(gpu_optimizer):
    for _ in range(3):
        for each in gpu_optimizer:
            for parameter in each.param_groups[0]["params"]:
                parameter.grad = parameter.detach() - 2
            each.step()
    fused, plain = ([each.detach() for each in made.param_groups[0]["params"]] for made in gpu_optimizer)
    assert gpu_optimizer[0].param_groups[0]["fused"] and gpu_optimizer[1].param_groups[0]["fused"] is None
    for one, other in zip(fused, plain, strict=True):
        torch.testing.assert_close(one, other)


def test_a_gpu_clips_without_asking_it_for_each_tensor(gpu_optimizer):
    flag, tensors = torch.zeros(1), [torch.tensor([3.0, 0.0]), torch.tensor([4.0])]
    norm, _ = clip_grads.multi_tensor_applier(clip_grads.l2_norm_impl, flag, [tensors], False)
    assert norm.tolist() == [5.0]
    others = [torch.zeros(2), torch.zeros(1)]
    mixed.multi_tensor_applier(mixed.multi_tensor_scale_impl, flag, [tensors, others], 1.0)
    clip_grads.multi_tensor_applier(clip_grads.multi_tensor_scale_impl, flag, [tensors, tensors], 0.5)
    assert [each.tolist() for each in (*tensors, *others)] == [[1.5, 0.0], [2.0], [3.0, 0.0], [4.0]]
    clip_grads.multi_tensor_applier(clip_grads.multi_tensor_scale_impl, flag, [[], []], 0.5)
    with FakeTensorMode():
        # A fake tensor has no content: whoever asks for it gets an error.
        fakes = [torch.zeros(2), torch.zeros(1)]
        norm, _ = clip_grads.multi_tensor_applier(clip_grads.l2_norm_impl, flag, [fakes], False)
        assert norm.shape == (1,)


@pytest.fixture
def settings(monkeypatch):
    """Switches of this process, which are as before afterwards."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    yield
    torch.use_deterministic_algorithms(False)
    os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_gpu_that_is_to_repeat_its_numbers_adds_in_a_fixed_order(settings, device):
    add_in_fixed_order(torch.device(device))
    is_gpu = device == "cuda"
    assert (
        torch.are_deterministic_algorithms_enabled() == torch.is_deterministic_algorithms_warn_only_enabled() == is_gpu
    )
    assert os.environ.get("CUBLAS_WORKSPACE_CONFIG") == (":4096:8" if is_gpu else None)
    assert torch.utils.deterministic.fill_uninitialized_memory != is_gpu
    model = gpt.ModelConfig(num_layers=2, hidden_size=16, ffn_hidden_size=16, num_attention_heads=2, max_context=8)
    assert gpt.transformer_config(model, gpt.ParallelLayout(), torch.device(device)).deterministic_mode == is_gpu


@pytest.mark.parametrize(("zero_centered", "norm"), [(False, WrappedTorchNorm), (True, RmsNorm)])
def test_local_layers_have_norms_that_need_no_package(monkeypatch, zero_centered, norm):
    monkeypatch.setattr(transformer_block, "LayerNormImpl", "needs a GPU")
    model = gpt.ModelConfig(
        num_layers=2,
        hidden_size=16,
        ffn_hidden_size=16,
        num_attention_heads=2,
        max_context=8,
        qk_norm=True,
        zero_centered_norms=zero_centered,
    )
    config = gpt.transformer_config(model, gpt.ParallelLayout(), torch.device("cpu"))
    block, _ = gpt._block_spec(model, config, range(2), is_local=True)
    layer = block.layer_specs[0].submodules
    attention = layer.self_attention.submodules
    norms = [block.layer_norm, layer.input_layernorm, layer.pre_mlp_layernorm]
    assert {*norms, attention.q_layernorm, attention.k_layernorm} == {norm}


@pytest.mark.parametrize("seeded", [(), ("model-parallel-rng",), ("data-parallel-rng", "expert-parallel-rng")])
def test_states_that_megatron_forks_are_there_and_those_of_a_program_stay(monkeypatch, seeded):
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: "state")
    monkeypatch.setattr(torch.cuda, "manual_seed", lambda seed: None)
    monkeypatch.setattr("megatron.core.tensor_parallel.random._get_cuda_rng_state", lambda **_: "state")
    monkeypatch.setattr("megatron.core.tensor_parallel.random._set_cuda_rng_state", lambda *_, **__: None)
    tracker = CudaRNGStatesTracker()
    for seed, name in enumerate(seeded):
        tracker.add(name, seed)
    before = tracker.get_states()
    monkeypatch.setattr(gpt, "get_cuda_rng_tracker", lambda: tracker)
    gpt._add_rng_states()
    gpt._add_rng_states()
    assert set(tracker.get_states()) == {*seeded, "model-parallel-rng", "expert-parallel-rng"}
    assert all(tracker.get_states()[name] is state for name, state in before.items())
