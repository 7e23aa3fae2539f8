#include <tessera/parallel/context/part_exchange.h>

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <utility>

namespace tessera::internal {

at::Tensor packed(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> flat;
  for (const auto& tensor : tensors) flat.push_back(tensor.reshape({-1}));
  return at::cat(flat);
}

std::vector<at::Tensor> unpacked(const at::Tensor& flat, const std::vector<std::vector<int64_t>>& shapes) {
  std::vector<at::Tensor> tensors;
  int64_t offset = 0;
  for (const auto& shape : shapes) {
    const auto count = c10::multiply_integers(shape);
    tensors.push_back(flat.narrow(0, offset, count).view(shape));
    offset += count;
  }
  return tensors;
}

Rotation::Rotation(const AttentionCall& call, const at::Tensor& flat, const std::string& label)
    : sent_(flat), received_(at::empty_like(flat)) {
  const auto ranks = static_cast<size_t>(call.ranks()), rank = static_cast<size_t>(call.rank());
  std::vector<int64_t> sent(ranks), received(ranks);
  sent[(rank + 1) % ranks] = flat.numel();
  received[(rank + ranks - 1) % ranks] = flat.numel();
  work_ = call.communicator->all_to_all(received_, sent_, received, sent, label);
}

at::Tensor Rotation::wait() {
  work_.wait();
  sent_.reset();
  return std::exchange(received_, {});
}

at::Tensor gathered(const AttentionCall& call, const at::Tensor& flat, const std::string& label) {
  if (call.ranks() == 1) return flat.unsqueeze(0);
  auto rows = at::empty({call.ranks(), flat.numel()}, flat.options());
  call.communicator->all_gather_into(rows.view({-1}), flat, label).wait();
  return rows;
}

at::Tensor reduced(const AttentionCall& call, const at::Tensor& rows, const std::string& label) {
  if (call.ranks() == 1) return rows[0];
  auto row = at::empty({rows.size(1)}, rows.options());
  call.communicator->reduce_scatter(row, rows.view({-1}), ReduceOp::kSum, label).wait();
  return row;
}

at::Tensor exchanged(const AttentionCall& call, const at::Tensor& rows, const std::string& label) {
  if (call.ranks() == 1) return rows;
  auto received = at::empty_like(rows);
  call.communicator->all_to_all(received.view({-1}), rows.view({-1}), {}, {}, label).wait();
  return received;
}

std::string label_of(const AttentionCall& call, const char* what, const std::vector<at::Tensor>& tensors) {
  std::string text = c10::str("context_parallel_attention (", to_string(call.scheme), "): ", what);
  for (const auto& tensor : tensors) text += c10::str(&tensor == tensors.data() ? " " : ", ", tensor.sizes());
  return text;
}

} // namespace tessera::internal
