#pragma once

// Internal: what the ranks of a call of attention send each other.

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include <tessera/collectives/work.h>
#include <tessera/parallel/context/attention_call.h>

namespace tessera::internal {

/// Tensors one after another in flat memory.
at::Tensor packed(const std::vector<at::Tensor>& tensors);
/// Views of such memory, of these shapes.
std::vector<at::Tensor> unpacked(const at::Tensor& flat, const std::vector<std::vector<int64_t>>& shapes);

/// What a rank sends the next one, while it gets as much from the one before.
class Rotation {
 public:
  Rotation(const AttentionCall& call, const at::Tensor& flat, const std::string& label);
  at::Tensor wait();

 private:
  at::Tensor sent_, received_;
  Work work_;
};

/// The flat tensors of all ranks, one row each.
at::Tensor gathered(const AttentionCall& call, const at::Tensor& flat, const std::string& label);

/// Sums tensors with a row for each rank over the ranks, and gives this rank's row.
at::Tensor reduced(const AttentionCall& call, const at::Tensor& rows, const std::string& label);

/// Sends row r of `rows` to rank r; row r of the result is from rank r.
at::Tensor exchanged(const AttentionCall& call, const at::Tensor& rows, const std::string& label);

/// What errors call a message: ranks with parts of other shapes are told apart by it.
std::string label_of(const AttentionCall& call, const char* what, const std::vector<at::Tensor>& tensors);

} // namespace tessera::internal
