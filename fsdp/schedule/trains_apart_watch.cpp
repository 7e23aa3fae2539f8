#include <tessera/fsdp/schedule/trains_apart_watch.h>

#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>

#include <absl/algorithm/container.h>

#include <algorithm>
#include <functional>
#include <mutex>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include <tessera/base/listing.h>
#include <tessera/dtensor/tensor/dtensor_impl.h>
#include <tessera/fsdp/buffers/unsharded_storage.h>

namespace tessera::internal {

namespace {

size_t checksum(const at::Tensor& tensor) {
  const c10::NoGradGuard no_grad;
  const auto plain = tensor.detach().cpu().contiguous();
  return std::hash<std::string_view>()({static_cast<const char*>(plain.const_data_ptr()), plain.nbytes()});
}

/// Each block that was sharded by itself finds the same parameters.
bool is_new(const std::vector<std::string>& found) {
  static std::mutex mutex;
  static std::set<std::vector<std::string>> known;
  const std::lock_guard lock(mutex);
  return known.insert(found).second;
}

} // namespace

void TrainsApartWatch::look(uint64_t writes, const std::function<bool(const at::Tensor&)>& is_ignored) {
  absl::erase_if(leaves_, [](const auto& leaf) { return leaf.second.tensor.expired(); });
  if (is_looking_ && writes != writes_) {
    // A step may leave them as they are: with a learning rate of 0, or where a load wrote the shards.
    if (warn_of_written() || leaves_.empty() || ++changes_ == kMostChanges) {
      end();
      leaves_.clear();
      return;
    }
  } else if (is_looking_ && unchanged_++ < kMostUnchanged) {
    for (auto& [address, leaf] : leaves_) leaf.is_input = leaf.is_input || leaf.is_written();
  }
  writes_ = writes;
  is_looking_ = true;
  remember_leaves(is_ignored);
}

void TrainsApartWatch::remember_leaves(const std::function<bool(const at::Tensor&)>& is_ignored) {
  const auto* nodes = torch::autograd::get_current_graph_task_nodes_in_graph();
  if (!nodes) return;
  for (auto* node : *nodes) {
    const auto* accumulator = dynamic_cast<const torch::autograd::AccumulateGrad*>(node);
    if (!accumulator || !accumulator->variable.defined()) continue;
    const auto& leaf = accumulator->variable;
    if (dtensor_meta(leaf) || !leaf.has_storage() || unsharded_storage(leaf)) continue; // of a sharded parameter
    if (leaf.layout() != at::kStrided || leaf.is_meta() || leaves_.contains(leaf.unsafeGetTensorImpl())) continue;
    if (is_ignored(leaf)) continue;
    leaves_.emplace(leaf.unsafeGetTensorImpl(),
                    Leaf{c10::weak_intrusive_ptr<c10::TensorImpl>(leaf.getIntrusivePtr()), checksum(leaf)});
  }
}

void TrainsApartWatch::count_holders() {
  constexpr size_t kOfParameter = 3; // its module, an optimizer, and autograd's node for its gradient
  for (auto& [address, leaf] : leaves_) leaf.is_input = leaf.is_input || leaf.tensor.use_count() < kOfParameter;
}

bool TrainsApartWatch::Leaf::is_written() const {
  const at::Tensor now(tensor.lock());
  return now.defined() && now.requires_grad() && internal::checksum(now) != checksum;
}

bool TrainsApartWatch::warn_of_written() const {
  std::vector<std::string> written;
  for (const auto& [address, leaf] : leaves_) {
    if (leaf.is_input || !leaf.is_written()) continue;
    const at::Tensor tensor(leaf.tensor.lock());
    written.push_back(c10::str(tensor.scalar_type(), tensor.sizes()));
  }
  std::sort(written.begin(), written.end());
  if (written.empty()) return false;
  if (!is_new(written)) return true;
  TORCH_WARN(
      "an optimizer stepped parameters that nothing sharded or replicated, beside others that are, so that each rank trains "
      "its own copy of them:",
      listing(written),
      "\nCall fully_shard or replicate on the module that holds them (on the root, mostly), or freeze them. "
      "tessera::summary of the model names them");
  return true;
}

} // namespace tessera::internal
