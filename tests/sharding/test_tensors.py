"""Where the files have a tensor: names, and ranges of larger tensors."""

from __future__ import annotations

from msrl_graph.sharding.layout import full_box
from msrl_graph.sharding.tensors import Tensor


def test_a_fused_tensor_is_a_range_of_rows_of_a_larger_one() -> None:
    tensor = Tensor("model.layers.0.mlp.up_proj.weight", (8, 4), fused="gate_up_proj", start=8)
    assert [*tensor.in_files(((2, 5), (0, 4)))] == [("model.layers.0.mlp.gate_up_proj.weight", (), ((10, 13), (0, 4)))]
    bias = Tensor("model.layers.0.mlp.up_proj.bias", (8,), fused="gate_up_proj", start=8)
    assert [*bias.in_files(full_box(bias.shape))] == [("model.layers.0.mlp.gate_up_proj.bias", (), ((8, 16),))]


def test_rows_of_experts_that_are_one_tensor_are_those_of_each_expert() -> None:
    name = "model.layers.0.mlp.experts.*.up_proj.weight"
    file_name = "model.layers.0.block_sparse_moe.up.weight"
    tensor = Tensor(name, (4, 8, 6), experts=True, fused="input_linear", start=8, file_name=file_name)
    assert not tensor.in_files_by_expert
    box = ((1, 3), (2, 5), (0, 6))
    held = ((1, 3), (10, 13), (0, 6))
    assert [*tensor.in_files(box)] == [("model.layers.0.block_sparse_moe.input_linear.weight", (), held)]


def test_experts_of_which_each_is_a_tensor_have_its_number_in_their_name() -> None:
    file_name = "backbone.layers.0.mixer.experts.*.up_proj.weight"
    tensor = Tensor("model.layers.0.mlp.experts.*.up_proj.weight", (4, 8, 6), experts=True, file_name=file_name)
    found = [*tensor.in_files(((2, 4), (0, 8), (0, 6)))]
    assert found == [
        (f"backbone.layers.0.mixer.experts.{expert}.up_proj.weight", (index,), ((0, 8), (0, 6)))
        for index, expert in enumerate((2, 3))
    ]
