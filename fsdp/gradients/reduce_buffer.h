#pragma once

// Internal: where the full gradients of a group are collected for their reduction.

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <optional>
#include <vector>

#include <tessera/fsdp/buffers/copy_list.h>
#include <tessera/fsdp/buffers/side_stream.h>
#include <tessera/fsdp/group/parameter_group.h>
#include <tessera/fsdp/layout/group_layout.h>

namespace tessera::internal {

/// The input of a reduction, [ranks × chunk_numel], and who uses its memory.
struct ReduceInput {
  at::Tensor data;
  BlockUsers users;

  /// Frees the memory, once it is reduced.
  void release();
};

/// On the CPU a gradient is copied into the buffer as it lands, so that it can be freed. A device with streams takes all of them
/// in one launch, for which they wait.
class ReduceBuffer {
 public:
  explicit ReduceBuffer(ParameterGroup& group) : group_(group) {}

  /// Nothing where it is allocated. `layout` must live, and stay as it is, until `take` or `drop`.
  void allocate(const ReduceLayout& layout, at::ScalarType dtype);
  bool is_allocated() const { return input_.data.defined(); }
  /// Writes the full gradient of parameter `index`, or adds it to what is there of it.
  void add(size_t index, const at::Tensor& gradient);
  /// Zeros, where nothing is there of it.
  void add_nothing(size_t index);
  /// Copies what waits for it.
  void flush();
  /// The whole, as the input of a reduction: zeros for the parameters without a gradient that take part, and a flag for each one
  /// that this rank used. Leaves no buffer.
  ReduceInput take(const std::vector<bool>& takes_part, const std::vector<bool>& used);
  void drop();

 private:
  template <typename Visit, typename VisitRows>
  void visit_pieces(size_t index, const at::Tensor& gradient, const Visit& visit, const VisitRows& visit_rows) const;
  void copy_now(size_t index, const at::Tensor& gradient);
  void collect(CopyList& list, size_t index);
  void zero(CopyList& list, size_t index) const;
  void flag(CopyList& list, const std::vector<bool>& used);
  bool can_cat(const std::vector<bool>& takes_part) const;
  void cat(const std::vector<bool>& takes_part, const std::vector<bool>& used);
  std::vector<at::Tensor> chunks_of(const std::vector<at::Tensor>& gradients, const at::Tensor& flags) const;
  std::vector<at::Tensor> pieces_of(const std::vector<at::Tensor>& gradients, const at::Tensor& flags) const;
  at::Tensor range(size_t index, size_t rank) const;
  at::Tensor rows(const Stretch& stretch) const; ///< of the buffer, one a rank

  ParameterGroup& group_;
  const ReduceLayout* layout_ = nullptr;
  ReduceInput input_;
  std::vector<bool> is_filled_; ///< something is there of a parameter, or waits
  std::vector<bool> is_copied_; ///< it is in the buffer
  std::vector<at::Tensor> waiting_;
  /// Which parameters were used, last time, and the same on the device: mostly the same again, and a copy to there waits for it.
  struct Flags {
    /// A flag a parameter, padded to `width`, and the same for each rank.
    const at::Tensor& update(const std::vector<bool>& now, const at::TensorOptions& options, int64_t width, int64_t ranks = 1);

    /// Whether they are `now` on the current stream. Those of another stream are not read: it may free them meanwhile.
    bool are(const std::vector<bool>& now, const at::TensorOptions& options) const;

    std::vector<bool> used;
    at::Tensor values;
    std::optional<c10::Stream> stream; ///< that `values` were made on
  };
  Flags flags_, rows_of_flags_;
};

} // namespace tessera::internal
