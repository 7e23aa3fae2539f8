#pragma once

// Internal: the losses of a rank's micro-batches, and their means over all ranks.

#include <map>
#include <optional>
#include <string>
#include <vector>

#include <tessera/training/loop/step/agreement.h>
#include <tessera/training/trainer_events.h>

namespace tessera::internal {

/// The names of the numbers beside the loss, once the ranks have agreed on them.
using AgreedNames = std::optional<std::vector<std::string>>;

/// What is reduced beside the losses, in the same launch.
struct Beside {
  std::vector<double> sums, maxima;
};

/// Sums of losses, and of the numbers beside them, on one rank and then over all. Tensors stay on their device until `reduce`.
class LossSums {
 public:
  /// Adds the loss of a batch that counts `count`. Returns its tensor, a number without dims; throws where that is none. `name`
  /// is the batch's in errors. Notes in `agreement` a count that is another than the loss's own.
  at::Tensor add(const Loss& loss, double count, const std::string& name, Agreement& agreement);

  struct Means {
    double loss = 0, max_loss = 0, count = 0;
    std::map<std::string, double> also;
    bool is_finite = true; ///< the loss of every rank
  };
  /// The means over all ranks, and `beside` reduced. Every rank calls it. Throws on all where one has noted an error, or has
  /// other names; the first call with `names` agrees on them.
  Means reduce(Agreement& agreement, AgreedNames& names, Beside& beside) const;

 private:
  struct Value {
    at::Tensor tensor;
    double weight = 1;
  };
  struct Sum {
    std::vector<Value> values;
    double count = 0;
    double total() const;
  };

  Sum loss_;
  std::map<std::string, Sum> also_;
};

} // namespace tessera::internal
