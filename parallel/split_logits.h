#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

namespace tessera {

// What is asked of logits [..., classes] whose classes are split over ranks, as those of a VocabParallel head are, without
// gathering them. All functions take plain logits too, and give what they would give for the whole: a program need not know how
// its model lies. Every rank of the mesh calls them.

/// The largest logits of each row, in falling order, and their classes: [..., k], whole on every rank of the dim that splits the
/// classes. Equal logits: of k = 1 the first class. NaN counts as the largest. No gradient. Sends 2 all-gathers of k numbers a
/// row and rank. An error for logits that are no floating-point numbers or of another layout than Shard, and for k < 1 or more
/// than there are classes.
struct LargestLogits {
  at::Tensor values, classes;
};
LargestLogits largest_logits(const at::Tensor& logits, int64_t k);

struct SampleOptions {
  double temperature = 1; ///< divides the logits; 0: the largest
  int64_t top_k = 0;      ///< only of so many largest logits of a row; 0: of all
  std::optional<at::Generator> generator = std::nullopt;
};

/// A class a row, [...], drawn with the probabilities softmax(logits / temperature), by the largest of logits with Gumbel noise.
/// The noise is drawn by an element's place in the whole: ranks whose generators are alike draw what one process draws, and all
/// the same. No gradient. Sends what `largest_logits` does for k = 1, and with `top_k` for that. An error for a negative
/// temperature and what `largest_logits` refuses.
at::Tensor sample_logits(const at::Tensor& logits, const SampleOptions& options = {});

/// log softmax(logits) at `classes`, numbers [...]: a tensor of their shape, with the gradient of the whole logarithm whatever is
/// computed of it. 0 for the class -100, as cross_entropy_loss ignores it. Sends 3 all-reduces of a number a row. An error for
/// other classes outside of the logits'.
at::Tensor log_probabilities(const at::Tensor& logits, const at::Tensor& classes);

} // namespace tessera
