#include <tessera/fsdp/explain.h>

#include <absl/container/flat_hash_set.h>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <ostream>
#include <utility>

#include <tessera/base/text_table.h>
#include <tessera/collectives/process_context.h>
#include <tessera/dtensor/tensor/dtensor_impl.h>
#include <tessera/fsdp/buffers/bytes_of.h>
#include <tessera/fsdp/buffers/storage_count.h>
#include <tessera/fsdp/fully_shard.h>
#include <tessera/fsdp/memory_prediction.h>
#include <tessera/fsdp/model/sharded_module.h>

namespace tessera::internal {

namespace {

using nlohmann::ordered_json;

/// Of buffers, and of parameters that no group of the model below `root` has: plain ones, and DTensors that were ignored or are
/// another model's.
MemoryPrediction plain_memory(const torch::nn::Module& module, ShardedModule& root, const ExplainOptions& options) {
  absl::flat_hash_set<const ParameterGroup*> groups;
  for (const auto& group : root.subtree_groups()) groups.insert(group.get());
  MemoryPrediction known;
  absl::flat_hash_set<const c10::TensorImpl*> seen;
  for (const auto& parameter : module.parameters()) {
    const auto* sharded = parameter_meta(parameter);
    if ((sharded && groups.contains(sharded->group)) || !seen.insert(parameter.unsafeGetTensorImpl()).second) continue;
    const auto* meta = dtensor_meta(parameter);
    const int64_t bytes = bytes_of(meta ? meta->local : parameter);
    known.parameters += bytes;
    if (!parameter.requires_grad()) continue;
    known.optimizer_state += options.optimizer_tensors * bytes;
    known.gradients += bytes;
  }
  StorageCount buffers;
  for (const auto& buffer : module.buffers()) buffers.add(buffer);
  known.buffers = buffers.bytes();
  return known;
}

using Category = std::pair<const char*, int64_t MemoryPrediction::*>;
constexpr std::array<Category, 9> kCategories{{{"parameters", &MemoryPrediction::parameters},
                                               {"buffers", &MemoryPrediction::buffers},
                                               {"optimizer_state", &MemoryPrediction::optimizer_state},
                                               {"gradients", &MemoryPrediction::gradients},
                                               {"unsharded", &MemoryPrediction::unsharded},
                                               {"reduce_buffers", &MemoryPrediction::reduce_buffers},
                                               {"cached", &MemoryPrediction::cached},
                                               {"activations", &MemoryPrediction::activations},
                                               {"temporaries", &MemoryPrediction::temporaries}}};

ordered_json json_of(const GroupSummary& group) {
  return {{"name", group.name},
          {"mesh", group.mesh},
          {"strategy", group.strategy},
          {"layout", group.layout},
          {"parameters", group.parameters},
          {"shard_bytes", group.shard_bytes},
          {"unsharded_bytes", group.unsharded_bytes},
          {"gather_bytes", group.gather_bytes},
          {"reduce_bytes", group.reduce_bytes},
          {"reduce_payload_bytes", group.reduce_payload_bytes},
          {"padding_bytes", group.padding_bytes},
          {"reshards_after_forward", group.reshards_after_forward}};
}

std::string table_of(const MemoryPrediction& memory) {
  std::vector<TextRow> rows{{"memory at the peak", "bytes"}};
  for (const auto& [name, member] : kCategories) {
    std::string words = name;
    std::replace(words.begin(), words.end(), '_', ' ');
    rows.push_back({std::move(words), std::to_string(memory.*member)});
  }
  return text_table(rows, {"bytes"});
}

} // namespace

} // namespace tessera::internal

namespace tessera {

Explanation explain(const torch::nn::Module& module, const ExplainOptions& options) {
  TORCH_CHECK_VALUE(options.optimizer_tensors >= 0 && options.activation_bytes >= 0, "explain: optimizer_tensors is ",
                    options.optimizer_tensors, " and activation_bytes ", options.activation_bytes,
                    ", but neither can be negative, on rank ", process_context().rank());
  auto& state = *fsdp(module).state();
  const internal::ModelLock lock(state.schedule()->mutex());
  Explanation explanation{.rank = process_context().rank()};
  for (const auto& group : state.subtree_groups()) explanation.groups.push_back(internal::summary_of(*group));
  explanation.memory = internal::predict_memory(lock, state, options, internal::plain_memory(module, state, options));
  return explanation;
}

std::string Explanation::to_string() const {
  return internal::group_table(groups) + "\n" + internal::table_of(memory) +
         fmt::format("\nrank {}: at most {} bytes at once, at: {}\n", rank, memory.peak, memory.peak_at);
}

std::string Explanation::to_json() const {
  using internal::ordered_json;
  ordered_json predicted{{"peak", memory.peak}, {"peak_at", memory.peak_at}};
  for (const auto& [name, member] : internal::kCategories) predicted[name] = memory.*member;
  ordered_json object{{"format", "tessera explanation"}, {"version", 1}, {"rank", rank}, {"groups", ordered_json::array()}};
  for (const auto& group : groups) object["groups"].push_back(internal::json_of(group));
  object["memory"] = predicted;
  return object.dump(2);
}

std::ostream& operator<<(std::ostream& out, const Explanation& explanation) { return out << explanation.to_string(); }

} // namespace tessera
