#include <tessera/fsdp/summary.h>

#include <absl/container/flat_hash_map.h>
#include <absl/container/flat_hash_set.h>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <array>
#include <ostream>
#include <string_view>
#include <utility>

#include <tessera/base/text_table.h>
#include <tessera/dtensor/tensor/dtensor_impl.h>
#include <tessera/fsdp/buffers/bytes_of.h>
#include <tessera/fsdp/buffers/storage_count.h>
#include <tessera/fsdp/model/module_walk.h>
#include <tessera/fsdp/model/sharded_module.h>
#include <tessera/fsdp/setup/trains_apart.h>

namespace tessera::internal {

namespace {

/// Describes placements without the extents of a RaggedShard, which are another for each parameter.
std::string describe(const Placements& placements) {
  std::vector<std::string> parts;
  for (const auto& placement : placements)
    parts.push_back(std::holds_alternative<RaggedShard>(placement) ? "RaggedShard" : to_string(placement));
  return fmt::format("({})", fmt::join(parts, ", "));
}

at::ScalarType forward_dtype_of(const at::Tensor& parameter) {
  const auto* meta = dtensor_meta(parameter);
  return meta && meta->provenance.whole_dtype ? *meta->provenance.whole_dtype : parameter.scalar_type();
}

class Summarizer {
 public:
  explicit Summarizer(const torch::nn::Module& module) : walk_({const_cast<torch::nn::Module*>(&module)}) {}

  ModelSummary run() {
    for (const auto& visit : walk_.visits()) {
      const auto path = walk_.name(walk_.place_of(visit));
      for (const auto& item : Registry::parameters(*visit.module)) {
        if (item.value().defined()) add(path, *visit.module, item.key(), item.value());
      }
      for (const auto& item : visit.module->named_buffers(/*recurse=*/false)) {
        if (buffers_.add(item.value())) ++summary_.buffers;
      }
    }
    summary_.buffer_bytes = buffers_.bytes();
    const auto names = parameters_trained_apart(*walk_.visits().front().module);
    const absl::flat_hash_set<std::string_view> apart(names.begin(), names.end());
    for (auto& each : summary_.parameters) each.trains_apart = each.tied_to.empty() && apart.contains(each.name);
    return std::move(summary_);
  }

 private:
  void add(const std::string& path, const torch::nn::Module& module, const std::string& key, const at::Tensor& tensor) {
    ParameterSummary row;
    row.name = path.empty() ? key : path + "." + key;
    row.module = path;
    row.module_class = module.name();
    row.dtype = tensor.scalar_type();
    row.forward_dtype = forward_dtype_of(tensor);
    row.requires_grad = tensor.requires_grad();
    if (const auto* meta = parameter_meta(tensor)) {
      row.group = meta->group->label();
      if (groups_.insert(meta->group).second) summary_.groups.push_back(summary_of(*meta->group));
    }
    const auto* meta = dtensor_meta(tensor);
    if (meta) row.placements = describe(meta->spec->placements());
    const auto [known, is_first] = seen_.emplace(tensor.unsafeGetTensorImpl(), row.name);
    if (is_first) {
      const auto& local = meta ? meta->local : tensor;
      row.bytes = bytes_of(tensor);
      row.local_bytes = local.is_meta() ? 0 : bytes_of(local);
    } else {
      row.tied_to = known->second;
    }
    summary_.parameters.push_back(std::move(row));
  }

  ModuleWalk walk_;
  ModelSummary summary_;
  StorageCount buffers_;
  absl::flat_hash_map<const c10::TensorImpl*, std::string> seen_;
  absl::flat_hash_set<const ParameterGroup*> groups_;
};

std::string note_on(const ParameterSummary& parameter) {
  if (!parameter.tied_to.empty()) return "tied to " + parameter.tied_to;
  if (parameter.trains_apart) return "trains apart";
  return parameter.requires_grad ? "" : "frozen";
}

/// What two parameters of a module must share to stand in one line.
std::array<std::string, 4> kind_of(const ParameterSummary& each) {
  const std::string dtype = c10::toString(each.dtype), forward = c10::toString(each.forward_dtype);
  return {each.group.empty() ? "-" : each.group, each.placements.empty() ? "plain" : each.placements,
          dtype == forward ? dtype : dtype + ", forward " + forward, note_on(each)};
}

std::string table_of_modules(const std::vector<ParameterSummary>& parameters) {
  std::vector<TextRow> rows{{"module", "class", "parameters", "group", "placements", "dtype", "bytes", "here", ""}};
  for (size_t i = 0; i < parameters.size();) {
    const auto& first = parameters[i];
    const auto kind = kind_of(first);
    std::vector<std::string> names;
    int64_t bytes = 0, here = 0;
    for (; i < parameters.size() && parameters[i].module == first.module && kind_of(parameters[i]) == kind; ++i) {
      const auto& name = parameters[i].name;
      names.push_back(first.module.empty() ? name : name.substr(first.module.size() + 1));
      bytes += parameters[i].bytes;
      here += parameters[i].local_bytes;
    }
    rows.push_back({first.module.empty() ? "(model)" : first.module, first.module_class,
                    fmt::format("{}", fmt::join(names, ", ")), kind[0], kind[1], kind[2], std::to_string(bytes),
                    std::to_string(here), kind[3]});
  }
  return text_table(rows, {"bytes", "here"});
}

} // namespace

} // namespace tessera::internal

namespace tessera {

std::string ModelSummary::to_string() const {
  std::string text = internal::table_of_modules(parameters) + "\n";
  if (!groups.empty()) text += internal::group_table(groups) + "\n";
  int64_t count = 0, bytes = 0, here = 0, frozen = 0, plain = 0;
  std::vector<std::string> apart;
  for (const auto& each : parameters) {
    if (!each.tied_to.empty()) continue;
    ++count;
    bytes += each.bytes;
    here += each.local_bytes;
    frozen += each.requires_grad ? 0 : 1;
    plain += each.placements.empty() ? 1 : 0;
    if (each.trains_apart) apart.push_back(each.name);
  }
  text += fmt::format("{} parameters of {} bytes, {} here; {} frozen, {} plain; {} buffers of {} bytes\n", count, bytes, here,
                      frozen, plain, buffers, buffer_bytes);
  if (apart.empty()) return text;
  return text + fmt::format(
                    "each rank trains its own copy of {}, which nothing sharded or replicated: call fully_shard or "
                    "replicate on the module that holds them (on the root, mostly), or freeze them\n",
                    fmt::join(apart, ", "));
}

std::ostream& operator<<(std::ostream& out, const ModelSummary& summary) { return out << summary.to_string(); }

ModelSummary summary(const torch::nn::Module& module) { return internal::Summarizer(module).run(); }

} // namespace tessera
