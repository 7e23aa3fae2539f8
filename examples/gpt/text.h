#pragma once

#include <torch/torch.h>

#include <string>

namespace gpt {

/// Inputs and targets of one step, both [rows, sequence] int64: the target of a byte is the byte after it.
struct Batch {
  torch::Tensor inputs, targets;
};

/// The bytes of a text file: a training part, and its last twentieth for validation.
///
/// Batches are a function of (seed, step, row) alone, so the rows of a global batch are the same however many ranks share it, and
/// a resumed run goes on with the batches that the interrupted one would have seen.
class Text {
 public:
  /// Reads the file. An error when it cannot be read, or either part is shorter than `sequence` + 1 bytes.
  Text(const std::string& path, int64_t sequence, uint64_t seed);

  /// Rows `first_row` … `first_row` + `rows` - 1 of the training batch of `step`.
  Batch training_batch(int64_t step, int64_t first_row, int64_t rows) const;
  /// The same for the `index`-th validation batch.
  Batch validation_batch(int64_t index, int64_t first_row, int64_t rows) const;

  int64_t size() const { return bytes_.numel(); }
  /// Entropy of a single byte of the text, in nats: what a model reaches that knows the bytes' frequencies and nothing else.
  double unigram_entropy() const;
  /// The first `length` bytes of the validation part: prompts for sampling.
  torch::Tensor prompt(int64_t length) const;

 private:
  Batch draw(const torch::Tensor& part, uint64_t stream, int64_t step, int64_t first_row, int64_t rows) const;

  torch::Tensor bytes_, training_, validation_; // uint8; the parts are views
  int64_t sequence_;
  uint64_t seed_;
};

} // namespace gpt
