// Cells of recurrent networks. torch takes these fused operators on every device but the CPU, which therefore has no kernels for them.
#include <ATen/core/Tensor.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

Tensor with_bias(const Tensor& gates, const OptionalTensor& bias) {
  return bias.has_value() && bias->defined() ? gates + *bias : gates;
}

Tensor derivative_of_sigmoid(const Tensor& value) { return value * (1 - value); }
Tensor derivative_of_tanh(const Tensor& value) { return 1 - value * value; }

std::tuple<Tensor, Tensor, Tensor> lstm_cell(
    const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& cx, const OptionalTensor& input_bias,
    const OptionalTensor& hidden_bias) {
  const auto gates = (with_bias(input_gates, input_bias) + with_bias(hidden_gates, hidden_bias)).chunk(4, 1);
  const Tensor in = gates[0].sigmoid();
  const Tensor forget = gates[1].sigmoid();
  const Tensor cell = gates[2].tanh();
  const Tensor out = gates[3].sigmoid();
  const Tensor cy = forget * cx + in * cell;
  return {out * cy.tanh(), cy, at::cat({in, forget, cell, out}, 1)};
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell_backward(
    const OptionalTensor& grad_hy, const OptionalTensor& grad_cy, const Tensor& cx, const Tensor& cy, const Tensor& workspace, bool has_bias) {
  const auto gates = workspace.chunk(4, 1);
  const Tensor &in = gates[0], &forget = gates[1], &cell = gates[2], &out = gates[3];
  const Tensor dhy = grad_hy.has_value() && grad_hy->defined() ? *grad_hy : at::zeros_like(cy);
  const Tensor tanh_cy = cy.tanh();
  Tensor dcy = dhy * out * derivative_of_tanh(tanh_cy);
  if (grad_cy.has_value() && grad_cy->defined()) dcy = dcy + *grad_cy;
  const Tensor grad_gates = at::cat(
      {dcy * cell * derivative_of_sigmoid(in), dcy * cx * derivative_of_sigmoid(forget), dcy * in * derivative_of_tanh(cell),
       dhy * tanh_cy * derivative_of_sigmoid(out)},
      1);
  return {grad_gates, dcy * forget, has_bias ? grad_gates.sum(0) : Tensor()};
}

std::tuple<Tensor, Tensor> gru_cell(
    const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& hx, const OptionalTensor& input_bias,
    const OptionalTensor& hidden_bias) {
  const auto from_input = with_bias(input_gates, input_bias).chunk(3, 1);
  const auto from_hidden = with_bias(hidden_gates, hidden_bias).chunk(3, 1);
  const Tensor reset = (from_input[0] + from_hidden[0]).sigmoid();
  const Tensor update = (from_input[1] + from_hidden[1]).sigmoid();
  const Tensor fresh = (from_input[2] + reset * from_hidden[2]).tanh();
  return {fresh + update * (hx - fresh), at::cat({reset, update, fresh, hx, from_hidden[2]}, 1)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_cell_backward(const Tensor& grad_hy, const Tensor& workspace, bool has_bias) {
  const auto parts = workspace.chunk(5, 1);
  const Tensor &reset = parts[0], &update = parts[1], &fresh = parts[2], &hx = parts[3], &hidden = parts[4];
  const Tensor dfresh = grad_hy * (1 - update) * derivative_of_tanh(fresh);
  const Tensor dreset = dfresh * hidden * derivative_of_sigmoid(reset);
  const Tensor dupdate = grad_hy * (hx - fresh) * derivative_of_sigmoid(update);
  const Tensor input_gates = at::cat({dreset, dupdate, dfresh}, 1);
  const Tensor hidden_gates = at::cat({dreset, dupdate, dfresh * reset}, 1);
  return {
      input_gates, hidden_gates, grad_hy * update, has_bias ? input_gates.sum(0) : Tensor(), has_bias ? hidden_gates.sum(0) : Tensor()};
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_thnn_fused_lstm_cell", lstm_cell);
  m.impl("_thnn_fused_lstm_cell_backward_impl", lstm_cell_backward);
  m.impl("_thnn_fused_gru_cell", gru_cell);
  m.impl("_thnn_fused_gru_cell_backward", gru_cell_backward);
}

}  // namespace
