#pragma once

#include <tessera/data/data_source.h>

#include <cstdint>
#include <optional>

#include "gpt/text.h"

namespace gpt {

/// Rows of every batch: those of this rank (or of the ranks that split its sequences), from `first` on, and those of all.
struct Rows {
  int64_t first = 0, own = 0, all = 0;
};

/// The batches of a training, which has no epochs, or of a validation: a source for a `tessera::Trainer`.
class Batches {
 public:
  static Batches to_train(const Text& text, const Rows& rows) { return {text, rows, std::nullopt}; }
  static Batches to_validate(const Text& text, const Rows& rows, int64_t batches) { return {text, rows, batches}; }

  std::optional<Batch> next() {
    if (count_ && next_ == *count_) return std::nullopt;
    const auto index = next_++;
    return count_ ? text_->validation_batch(index, rows_.first, rows_.own) : text_->training_batch(index, rows_.first, rows_.own);
  }
  tessera::DataPosition position() const { return {.epoch = 0, .row = next_ * rows_.all}; }
  void seek(const tessera::DataPosition& position) { next_ = position.row / rows_.all; }

 private:
  Batches(const Text& text, const Rows& rows, std::optional<int64_t> count) : text_(&text), rows_(rows), count_(count) {}

  const Text* text_;
  Rows rows_;
  std::optional<int64_t> count_; ///< of a validation
  int64_t next_ = 0;
};

} // namespace gpt
