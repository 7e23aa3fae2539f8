#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <tessera/checkpoint/gathers.h>
#include <tessera/checkpoint/load_plan.h>
#include <tessera/checkpoint/pieces.h>
#include <tessera/checkpoint/plan.h>
#include <tessera/checkpoint/ranks.h>
#include <tessera/checkpoint/state_copy.h>
#include <tessera/dtensor/dtensor_impl.h>

#include <numeric>

namespace tessera {

namespace {

using checkpoint::Index;
using checkpoint::Json;
using checkpoint::JsonView;
using checkpoint::LoadPlan;
using checkpoint::Piece;
using checkpoint::Ranks;
using checkpoint::TensorRead;

constexpr auto kStep = "load a state dict";

// What a state dict holds, as an index without chunks.
Index contents_of(const StateDict& state) {
  Index contents;
  for (const auto& entry : state.entries()) {
    if (entry.is_tensor()) {
      const auto& tensor = std::get<at::Tensor>(entry.content);
      contents.tensors.push_back({entry.name, entry.aliases, tensor.scalar_type(), tensor.sizes().vec(), "", {}});
    } else {
      contents.values.emplace_back(entry.name, std::get<StateValue>(entry.content));
    }
  }
  return contents;
}

Json to_json(const Index& contents) {
  auto tensors = Json::array();
  for (const auto& t : contents.tensors) tensors.push_back({t.name, t.aliases, static_cast<int64_t>(t.dtype), t.sizes});
  return {{"tensors", std::move(tensors)}, {"values", checkpoint::to_json(contents.values)}};
}

Index contents_from_json(const JsonView& json) {
  Index contents;
  for (const auto& tensor : json["tensors"].elements()) {
    const auto fields = tensor.elements();
    std::vector<std::string> aliases;
    for (const auto& alias : fields.at(1).elements()) aliases.push_back(alias.string());
    contents.tensors.push_back({fields.at(0).string(),
                                std::move(aliases),
                                static_cast<at::ScalarType>(fields.at(2).integer()),
                                fields.at(3).non_negatives(),
                                "",
                                {}});
  }
  contents.values = checkpoint::values_from_json(json["values"]);
  return contents;
}

// What rank 0's `source` holds.
Index contents_of_rank0(const Ranks& ranks, const StateDict& source) {
  const auto messages = ranks.all("load the state dict of rank 0", [&] {
    if (ranks.rank() != 0) return std::string();
    for (const auto& entry : source.entries()) {
      const auto* tensor = std::get_if<at::Tensor>(&entry.content);
      TORCH_CHECK(!tensor || !dtensor_meta(*tensor), "broadcast_from_rank0 needs whole tensors, and \"", entry.name,
                  "\" is a DTensor");
    }
    return checkpoint::dump_json(to_json(contents_of(source)), "the state dict");
  });
  const std::string where = "the state dict of rank 0";
  const auto json = checkpoint::parse_json(messages[0], where);
  return contents_from_json(JsonView(json, where));
}

void check_fits(const LoadPlan& plan, bool strict) {
  std::string problems;
  if (strict && !plan.missing.empty()) problems += "\nmissing in the state dict:" + checkpoint::listing(plan.missing);
  if (strict && !plan.unused.empty()) problems += "\nunexpected in the state dict:" + checkpoint::listing(plan.unused);
  if (!plan.mismatches.empty()) problems += "\ndifferent in the state dict:" + checkpoint::listing(plan.mismatches);
  TORCH_CHECK(problems.empty(), "the state dict does not fit:", problems);
}

// Brings tensors of a state dict to where they are needed.
class Source {
 public:
  Source(const Ranks& ranks, const StateDict& state, bool broadcast) : ranks_(ranks), state_(state), broadcast_(broadcast) {}

  bool is_here() const { return !broadcast_ || ranks_.rank() == 0; }

  // Tensors that share memory in the target must be equal here, or one of them would be lost silently.
  void check_tied(const TensorRead& read) const {
    for (size_t i = 1; i < read.saved.size(); ++i) {
      const auto &first = read.saved[0]->name, &other = read.saved[i]->name;
      const auto a = whole_tensor(state_.tensor(first)), b = whole_tensor(state_.tensor(other));
      TORCH_CHECK(at::equal(a, b), "\"", read.entry->name, "\" is tied to \"", other,
                  "\", but the state dict holds different values for \"", first, "\" and \"", other, "\"");
    }
  }

  void copy(const TensorRead& read, const std::vector<Piece>& pieces) const {
    const auto& target = std::get<at::Tensor>(read.entry->content);
    const auto* to = dtensor_meta(target);
    const auto* from = broadcast_ ? nullptr : dtensor_meta(state_.tensor(read.saved[0]->name));
    if (to && from && to->spec == from->spec) {
      to->local.copy_(from->local);
    } else {
      const auto whole = whole_of(read);
      for (const auto& piece : pieces) piece.data.copy_(checkpoint::narrow(whole, piece.box));
    }
    checkpoint::mark_written(target);
  }

 private:
  at::Tensor whole_of(const TensorRead& read) const {
    const auto& saved = *read.saved[0];
    if (!broadcast_) return whole_tensor(state_.tensor(saved.name));
    auto whole = is_here() ? state_.tensor(saved.name).detach().to(at::kCPU).contiguous()
                           : at::empty(saved.sizes, at::TensorOptions(saved.dtype));
    ranks_.broadcast(whole, "load \"" + saved.name + "\"");
    return whole;
  }

  const Ranks& ranks_;
  const StateDict& state_;
  bool broadcast_;
};

std::string gathers_of(const LoadPlan& plan, const StateDict& source, const Ranks& ranks, bool broadcast) {
  std::vector<int64_t> world(static_cast<size_t>(ranks.size()));
  std::iota(world.begin(), world.end(), 0);
  checkpoint::Gathers gathers;
  for (const auto& read : plan.tensors) {
    for (const auto* saved : read.saved) {
      const auto* meta = broadcast ? nullptr : dtensor_meta(source.tensor(saved->name));
      if (broadcast || meta) gathers.add(meta ? meta->spec->mesh().ranks() : world, saved->name);
    }
  }
  return gathers.to_message();
}

} // namespace

IncompatibleKeys load_state_dict(StateDict& target, const StateDict& source, const StateDictOptions& options) {
  const c10::NoGradGuard no_grad;
  const Ranks ranks;
  const bool broadcast = options.broadcast_from_rank0;
  const auto contents = broadcast ? contents_of_rank0(ranks, source) : contents_of(source);
  LoadPlan plan;
  std::vector<std::vector<Piece>> pieces;
  const auto messages = ranks.all(kStep, [&] {
    const auto saved = contents.contents();
    for (const auto& binding : target.bindings()) binding->before_load(target, saved);
    plan = checkpoint::plan_load(target, contents, {});
    check_fits(plan, options.strict);
    for (const auto& read : plan.tensors)
      pieces.push_back(checkpoint::pieces_of(read.entry->name, std::get<at::Tensor>(read.entry->content)));
    return gathers_of(plan, source, ranks, broadcast);
  });
  checkpoint::Gathers::check_same(messages, kStep);
  const Source from(ranks, source, broadcast);
  ranks.all(kStep, [&] {
    for (const auto& read : plan.tensors) {
      if (from.is_here()) from.check_tied(read);
    }
    return std::string();
  });
  for (size_t i = 0; i < plan.tensors.size(); ++i) from.copy(plan.tensors[i], pieces[i]);
  for (const auto& [name, value] : plan.values) target.set(name, value);
  for (const auto& binding : target.bindings()) binding->after_load(target);
  return {plan.missing, plan.unused};
}

IncompatibleKeys load_state_dict(torch::nn::Module& module, const StateDict& source, const StateDictOptions& options) {
  auto target =
      read_on_all_ranks(kStep, [&] { return state_dict(module, {.ignore_frozen_params = options.ignore_frozen_params}); });
  return load_state_dict(target, source, options);
}

IncompatibleKeys load_state_dict(torch::nn::Module& module, torch::optim::Optimizer& optimizer, const StateDict& source,
                                 const StateDictOptions& options) {
  auto target = read_on_all_ranks(
      kStep, [&] { return state_dict(module, optimizer, {.ignore_frozen_params = options.ignore_frozen_params}); });
  return load_state_dict(target, source, options);
}

} // namespace tessera
