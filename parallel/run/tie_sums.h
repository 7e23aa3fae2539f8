#pragma once

// Internal: weights of which several ranks of a pipeline have a copy.

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include <tessera/collectives/communicator.h>
#include <tessera/parallel/pipeline_stages.h>

namespace tessera::internal::pipeline {

class TieSums {
 public:
  /// The ranks that share a weight make the communicators of it in one order.
  explicit TieSums(const PipelineStages& stages);

  /// Sets aside what `grad()` has of earlier steps, whose sums were made.
  void begin();
  /// Adds the gradients of all copies, on each of them, and what was set aside.
  void sum();

 private:
  struct Tie {
    std::string name;
    at::Tensor parameter;
    CommunicatorPtr communicator;
    at::Tensor aside = {};
  };
  std::vector<Tie> ties_;
  bool has_begun_ = false;
};

} // namespace tessera::internal::pipeline
