#include <tessera/optim/parts/own_values.h>

namespace tessera::internal {

OwnValues::OwnValues(torch::optim::Optimizer& optimizer, const OptimizerClass& kept) : optimizer_(optimizer), class_(kept) {
  for (const auto& field : class_.own) own_.push_back(field.get(optimizer));
  for (auto& group : optimizer.param_groups()) {
    for (const auto& field : class_.options) options_.push_back(field.get(group.options()));
  }
}

void OwnValues::put_back() const {
  for (size_t i = 0; i < own_.size(); ++i) class_.own[i].set(optimizer_, own_[i]);
  size_t next = 0;
  for (auto& group : optimizer_.param_groups()) {
    for (const auto& field : class_.options) field.set(group.options(), options_[next++]);
  }
}

} // namespace tessera::internal
