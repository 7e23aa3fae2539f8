#pragma once

namespace tessera {

/// While it lives, an operator of this thread without a sharding rule is an error, where it would be run on whole tensors with a
/// warning.
class StrictSharding {
 public:
  StrictSharding();
  ~StrictSharding();
  StrictSharding(const StrictSharding&) = delete;
  StrictSharding& operator=(const StrictSharding&) = delete;
};

} // namespace tessera
