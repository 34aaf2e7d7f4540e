"""PyTorch's own DDP tests pass under `sw.DDP`, or stand here with the reason why not."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ddp import adapter
from tests.pool import Pool

#: Tests that pass, of torch 2.13.
RUN = """
    test_DistributedDataParallel
    test_DistributedDataParallelCPU
    test_DistributedDataParallelCPU_grad_is_view
    test_DistributedDataParallel_requires_grad
    test_DistributedDataParallel_with_amp_and_grad_is_view
    test_accumulate_gradients_no_sync
    test_accumulate_gradients_no_sync_grad_is_view
    test_ddp_apply_optim_in_backward
    test_ddp_apply_optim_in_backward_grad_as_bucket_view_false
    test_ddp_broadcast_buffer
    test_ddp_create_graph
    test_ddp_forward_backward_hook
    test_ddp_inference
    test_ddp_model_diff_num_params_across_ranks
    test_ddp_model_diff_shape_across_ranks
    test_ddp_namedtuple
    test_ddp_new_tensor_in_fwd
    test_ddp_new_tensor_in_fwd_static_graph
    test_ddp_remove_autograd_hooks
    test_ddp_returns_tensor_with_no_grad
    test_ddp_shared_grad_acc_unused_params
    test_ddp_sink_noclone
    test_ddp_static_graph_nested_types
    test_ddp_zero_output_features
    test_grads_same_across_ranks_with_no_sync
    test_output_unused_in_loss_dict_module
    test_output_unused_in_loss_tuple_module
    test_post_localSGD_optimizer_parity
    test_post_localSGD_optimizer_parity_grad_is_view
    test_post_localSGD_optimizer_parity_with_hierarchical_sgd
    test_post_localSGD_optimizer_parity_with_hierarchical_sgd_grad_is_view
    test_post_localSGD_optimizer_step_reload
    test_stateless_api_with_ddp
    test_static_graph_multi_forward
    test_undefined_grad_parity_unused_parameters
"""

#: Those of them for which torch's own DDP needs a GPU: streams, modules with SyncBatchNorm.
STOCK_NEEDS_A_GPU = """
    test_ddp_apply_optim_in_backward
    test_ddp_apply_optim_in_backward_grad_as_bucket_view_false
    test_ddp_inference
"""

#: The one that takes longer than all others: torch.compile builds four graphs.
COMPILED = "test_ddp_compile_static_graph"

#: Tests that another implementation cannot pass, or is not asked to, by the reason.
EXCLUDED = {
    "about CUDA: SyncBatchNorm takes inputs on a GPU only": """
        test_DistributedDataParallel_SyncBatchNorm
        test_DistributedDataParallel_SyncBatchNorm_2D_Input
        test_DistributedDataParallel_SyncBatchNorm_Channels_Last
        test_DistributedDataParallel_SyncBatchNorm_Diff_Input_Sizes_Running_Value
        test_DistributedDataParallel_SyncBatchNorm_Diff_Input_Sizes_gradient
        test_DistributedDataParallel_SyncBatchNorm_No_Affine
        test_DistributedDataParallel_SyncBatchNorm_Single_Input_Per_Process
        test_DistributedDataParallel_SyncBatchNorm_half
        test_ddp_sync_bn_training_vs_eval
        test_ddp_uneven_inputs_stop_iteration_sync_bn
    """,
    "about CUDA: streams, and inputs that are moved to a GPU": """
        test_DistributedDataParallel_non_default_stream
        test_ddp_device
    """,
    "communication hooks, on gradients and buffers, which sw.DDP has not": """
        test_accumulate_gradients_no_sync_allreduce_hook
        test_accumulate_gradients_no_sync_allreduce_with_then_hook
        test_ddp_broadcast_buffer_via_hook
        test_ddp_buffer_hook_allreduce
        test_ddp_buffer_hook_allreduce_return_future
        test_ddp_comm_hook_logging
        test_ddp_hook_parity_allreduce
        test_ddp_hook_parity_allreduce_process_group
        test_ddp_hook_parity_post_localSGD
        test_ddp_hook_parity_powerSGD
        test_ddp_hook_pickling_powerSGD
        test_ddp_python_error_logged
    """,
    "join: ranks with fewer batches than others, which sw.DDP does not shadow": """
        test_ddp_grad_div_uneven_inputs
        test_ddp_join_model_equivalence
        test_ddp_join_respects_forward_sync_buffers_false
        test_ddp_uneven_input_exception
        test_ddp_uneven_input_join_disable
        test_ddp_uneven_inputs
    """,
    "parameters that DDP is to ignore, which sw.DDP does not": """
        test_ddp_apply_optim_in_backward_ignored_params
        test_ddp_ignore_params_arg
        test_ddp_multiple_nested_unused_params_err_ignore_params
        test_ddp_native_mixed_precision_ignored_params
        test_get_data_parallel_params
    """,
    "DDP's own mixed precision: with sw it is a word of an engine's plan": """
        test_ddp_native_mixed_precision_grad_as_bucket_view_no_set_grad_none
        test_ddp_native_mixed_precision_grad_as_bucket_view_set_grad_to_none
        test_ddp_native_mixed_precision_no_grad_as_bucket_view_no_set_grad_none
        test_ddp_native_mixed_precision_no_grad_as_bucket_view_set_grad_to_none
    """,
    "an error that sw.DDP has no cause for: unused parameters need no flag, graphs may change": """
        test_ddp_multiple_nested_unused_params_error
        test_ddp_unused_params_rebuild_buckets_exception
        test_invalid_static_graph
        test_static_graph_api_cpu
    """,
    "the reducer's internals: buckets, maps of used parameters, names by index": """
        test_ddp_bucket_cap_mb_list
        test_ddp_build_debug_param_to_name_mapping
        test_ddp_build_debug_param_to_name_mapping_requires_grad
        test_ddp_control_flow_different_across_ranks
        test_ddp_control_flow_same_across_ranks
        test_detect_ddp_is_actually_static
    """,
    "the reducer's logging data, and the profiler's names of its collectives": """
        test_ddp_logging_data_cpu
        test_ddp_logging_data_gpu
        test_ddp_profiling_autograd_profiler
        test_ddp_profiling_execution_trace
        test_ddp_profiling_torch_profiler
        test_different_graph_across_ranks
        test_skip_all_reduce_unused_parameters
        test_sync_bn_logged
    """,
    "options and attributes of torch's class: a device mesh, deprecations": """
        test_ddp_broadcast_buffers_deprecation_warning
        test_ddp_device_mesh_initialization
        test_ddp_init_sync_buffers_with_forward_sync_buffers_false
    """,
    "functions of torch.distributed, which sw.DDP does not call": """
        test_compute_bucket_assignment_by_size_sparse_error_with_logger
        test_compute_bucket_assignment_by_size_sparse_error_without_logger
        test_ddp_sync_module_states
        test_verify_model_across_rank_with_logger
        test_verify_model_across_rank_without_logger
    """,
    "skipped by PyTorch itself": """
        test_ddp_has_finalized
    """,
}


@pytest.fixture(scope="module")
def tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator["Runner"]:
    """Two processes for all of them: what the tests import changes torch for good."""
    pool = Pool(2)
    yield Runner(pool, tmp_path_factory.mktemp("torch"))
    pool.close()


class Runner:
    """PyTorch's tests, in processes that know how to run them."""

    def __init__(self, pool: Pool, folder: Path) -> None:
        self.pool, self.folder = pool, str(folder)
        (folder / "barrier").mkdir()
        (folder / "test_dir").mkdir()
        (folder / "lockfile").touch()
        found = pool.run(adapter.find, (self.folder,))[0]
        if isinstance(found, str):
            pool.close()
            pytest.skip(found)
        self.names: list[str] = found

    def run(self, names: str, ddp: str) -> dict[str, str]:
        """Of each that did not pass on every rank what it raised; another torch may have fewer."""
        there = [name for name in names.split() if name in self.names]
        assert there
        outcomes = self.pool.run(adapter.run, (there, ddp, self.folder))
        return {n: text for found in outcomes for n, text in found.items() if text != "passed"}


@pytest.mark.full
def test_torchs_tests_of_ddp_pass_under_ours(tests: Runner) -> None:
    """All that are not about CUDA or the insides of torch's class."""
    assert tests.run(RUN, "ours") == {}


@pytest.mark.full
def test_the_adapter_runs_torchs_ddp(tests: Runner) -> None:
    """The control: torch's own DDP passes the same tests, but those for which it needs a GPU."""
    needing = STOCK_NEEDS_A_GPU.split()
    assert tests.run(" ".join(n for n in RUN.split() if n not in needing), "stock") == {}


@pytest.mark.full
def test_torchs_test_of_compiled_ddp_passes_under_ours(tests: Runner) -> None:
    """torch.compile of two wrapped modules, which give the same outputs and gradients."""
    assert tests.run(COMPILED, "ours") == {}


def test_torchs_tests_find_a_fault(tests: Runner) -> None:
    """Under a DDP whose ranks train alone the tests of training fail."""
    names = "test_DistributedDataParallelCPU test_accumulate_gradients_no_sync"
    assert sorted(tests.run(names, "unsynced")) == names.split()


def test_every_other_test_stands_in_the_list_with_its_reason(tests: Runner) -> None:
    """None is left out in silence, and none is on two lists."""
    excluded = [name for listed in EXCLUDED.values() for name in listed.split()]
    known = [*RUN.split(), COMPILED, *excluded]
    assert len(known) == len(set(known))
    assert [name for name in tests.names if name not in known] == []
