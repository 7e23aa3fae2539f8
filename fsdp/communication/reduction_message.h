#pragma once

// Internal: what a rank sends of its gradients where their reduction is quantized.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include <tessera/fsdp/reduction_extension.h>
#include <tessera/mixed_precision/block_codec.h>

namespace tessera::internal {

/// One message: where its content lies among the elements of a flat tensor and among its bytes. First come the flags. What is
/// sent as it is and the codes follow.
struct ReductionMessage {
  std::vector<CodedRange> raw, coded;
  std::vector<size_t> parameters; ///< of `coded`
  int64_t bytes = 0;

  /// Returns the same at another place of the elements and of the bytes.
  ReductionMessage moved(int64_t elements, int64_t bytes_on) const;
};

/// Makes messages of the gradients in chunks, of which a part of the parameters is coded.
class ReductionMessages {
 public:
  ReductionMessages(std::shared_ptr<const GradientLayout> layout, const BlockCodec& codec, std::vector<bool> is_coded)
      : layout_(std::move(layout)), codec_(codec), is_coded_(std::move(is_coded)) {}

  const BlockCodec& codec() const { return codec_; }
  /// The message of the chunks [first, first + chunks), which begin at element 0.
  ReductionMessage of_chunks(int64_t first, int64_t chunks) const;
  /// The message of one of `parts` equal parts of a chunk, by its blocks. What is sent as it is belongs to part 0.
  ReductionMessage of_part(int64_t chunk, int64_t part, int64_t parts) const;

  /// Writes `message` to `bytes`, from the chunks in `values`. With a `residual`, that of parameters that the flags of `flagged`
  /// (chunks) do not name stays for another step: what was sent of it would reach no gradient where no rank used them.
  void write(const ReductionMessage& message, const at::Tensor& values, const at::Tensor& bytes, const at::Tensor& residual,
             const at::Tensor& flagged) const;
  /// Reads what was sent as it is, and the codes, into `values`, or adds it there. They are of the layout's dtype, or wider.
  void read(const ReductionMessage& message, const at::Tensor& bytes, const at::Tensor& values, DecodeInto into) const;
  /// Writes the flags of `values`, which are those of each chunk, to the message at `byte`.
  void write_flags(const at::Tensor& values, const at::Tensor& bytes, int64_t byte) const;
  /// Writes to each chunk of `values` the flags of `messages` ([ranks, bytes]): those of any rank.
  void read_flags(const at::Tensor& messages, const at::Tensor& values) const;

 private:
  int64_t flag_bytes() const;
  void encode_on_host(const ReductionMessage& message, const at::Tensor& values, const at::Tensor& bytes,
                      const at::Tensor& residual, const at::Tensor& flags) const;
  void encode_on_device(const ReductionMessage& message, const at::Tensor& values, const at::Tensor& bytes,
                        const at::Tensor& residual, const at::Tensor& flags) const;
  void add(ReductionMessage& message, size_t parameter, int64_t first, int64_t numel) const;

  std::shared_ptr<const GradientLayout> layout_;
  BlockCodec codec_;
  std::vector<bool> is_coded_; ///< by parameter
};

} // namespace tessera::internal
