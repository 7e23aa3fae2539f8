#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <tessera/base/listing.h>
#include <tessera/checkpoint/load/load_plan.h>
#include <tessera/checkpoint/save/plan.h>
#include <tessera/checkpoint/state/compare_ranks.h>
#include <tessera/checkpoint/state/ranks.h>
#include <tessera/checkpoint/state/state_copy.h>
#include <tessera/dtensor/tensor/dtensor_impl.h>

#include <map>
#include <numeric>
#include <string>
#include <utility>

namespace tessera::internal {

namespace {

constexpr auto kStep = "load a state dict";

// Runs on the rank that reads it, before another one waits for what it cannot read.
void check_readable(const StateDict& state) {
  for (const auto& entry : state.entries()) {
    if (!entry.is_tensor()) continue;
    const auto& tensor = std::get<at::Tensor>(entry.content);
    TORCH_CHECK(!tensor.is_meta(), "\"", entry.name, "\" of the state dict is a meta tensor, which has no values");
    TORCH_CHECK(tensor.layout() == at::kStrided, "\"", entry.name, "\" of the state dict is ", tensor.layout(),
                ", and a load takes strided tensors alone");
    check_access(entry.name, tensor, Access::kRead);
  }
}

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

Json json_of(const Index& contents) {
  auto tensors = Json::array();
  for (const auto& t : contents.tensors) tensors.push_back({t.name, t.aliases, static_cast<int64_t>(t.dtype), t.sizes});
  return {{"tensors", std::move(tensors)}, {"values", internal::to_json(contents.values)}};
}

Index contents_from_json(const JsonView& json) {
  Index contents;
  for (const auto& tensor : json["tensors"].elements()) {
    const auto fields = tensor.elements();
    const auto dtype = static_cast<at::ScalarType>(fields.at(2).integer());
    contents.tensors.push_back({fields.at(0).string(), fields.at(1).strings(), dtype, fields.at(3).non_negatives(), "", {}});
  }
  contents.values = values_from_json(json["values"]);
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
    return dump_json(json_of(contents_of(source)), "the state dict");
  });
  const std::string where = "the state dict of rank 0";
  const auto json = parse_json(messages[0], where);
  return contents_from_json(JsonView(json, where));
}

void check_fits(const LoadPlan& plan, bool strict) {
  std::string problems;
  const auto* hint = plan.could_cast ? "\nStateDictOptions::cast converts between dtypes" : "";
  if (strict && !plan.missing.empty()) problems += "\nmissing in the state dict:" + listing(plan.missing);
  if (strict && !plan.unused.empty()) problems += "\nunexpected in the state dict:" + listing(plan.unused);
  if (!plan.mismatches.empty()) problems += "\ndifferent in the state dict:" + listing(plan.mismatches);
  TORCH_CHECK(problems.empty(), "the state dict does not fit:", problems, hint);
}

// Brings tensors of a state dict to where they are needed.
class Source {
 public:
  Source(const Ranks& ranks, const StateDict& state, bool broadcast) : ranks_(ranks), state_(state), broadcast_(broadcast) {}

  bool is_here() const { return !broadcast_ || ranks_.rank() == 0; }

  // Tensors that share memory in the target must be equal here, or one of them would be lost silently. Throws after the last one:
  // they are gathered, and on other ranks they may all be equal.
  void check_tied(const LoadPlan& plan) const {
    std::string problem;
    for (const auto& read : plan.tensors) {
      for (size_t i = 1; i < read.saved.size(); ++i) {
        const auto &first = read.saved[0]->name, &other = read.saved[i]->name;
        const auto a = whole_tensor(state_.tensor(first)), b = whole_tensor(state_.tensor(other));
        if (problem.empty() && !equal_bytes(a, b))
          problem = c10::str("\"", read.name, "\" is tied to \"", other, "\", but the state dict holds different values for \"",
                             first, "\" and \"", other, "\"");
      }
    }
    TORCH_CHECK(problem.empty(), problem);
  }

  void copy(const TensorRead& read) const {
    const auto* to = dtensor_meta(read.tensor);
    const auto* from = broadcast_ ? nullptr : dtensor_meta(state_.tensor(read.saved[0]->name));
    mark_written(read.tensor); // first: also where the copy fails half way
    if (to && from && to->spec == from->spec) {
      to->local.copy_(from->local);
    } else {
      const auto whole = whole_of(read);
      for (const auto& piece : read.pieces) piece.data.copy_(narrow(whole, piece.box));
    }
  }

 private:
  at::Tensor whole_of(const TensorRead& read) const {
    const auto& saved = *read.saved[0];
    if (!broadcast_) return whole_tensor(state_.tensor(saved.name));
    auto whole = is_here() ? state_.tensor(saved.name).detach().resolve_conj().resolve_neg().to(at::kCPU).contiguous()
                           : at::empty(saved.sizes, at::TensorOptions(saved.dtype));
    ranks_.broadcast(whole, "load \"" + saved.name + "\"");
    return whole;
  }

  const Ranks& ranks_;
  const StateDict& state_;
  bool broadcast_;
};

// Keeps the options that concern the module's own tensors.
StateDictOptions own_options(const StateDictOptions& options) {
  return {.ignore_frozen_params = options.ignore_frozen_params,
          .allow_unsharded_params = options.allow_unsharded_params,
          .prefix = options.prefix};
}

// Each rank cuts its part of a sharded tensor from its own whole one: of different ones it would become a mixture.
void check_same_values(const Ranks& ranks, const LoadPlan& plan, const StateDict& source) {
  if (ranks.size() == 1) return;
  const auto differences = compare_ranks(ranks, [&] {
    ComparedTensors whole;
    for (const auto& read : plan.tensors) {
      const auto* meta = dtensor_meta(read.tensor);
      const auto& from = source.tensor(read.saved[0]->name);
      if (meta && !dtensor_meta(from)) whole.emplace_back(read.name + " on " + meta->spec->mesh().to_string(), from);
    }
    return whole;
  });
  std::vector<std::string> lines;
  for (const auto& [name, difference] : differences) {
    std::vector<int64_t> others;
    for (const auto rank : difference.others) others.push_back(ranks.rank_of_job(static_cast<size_t>(rank)));
    lines.push_back(
        c10::str(name, ": ", describe_ranks(others), " from rank ", ranks.rank_of_job(static_cast<size_t>(difference.ranks[0]))));
  }
  TORCH_CHECK(lines.empty(), "checkpoint: cannot ", kStep,
              ": whole tensors, of which each rank takes its part, differ between ranks:", listing(lines),
              "\nStateDictOptions::broadcast_from_rank0 gives every rank those of rank 0");
}

Agreement agreement_on(const LoadPlan& plan, const StateDict& source, const Ranks& ranks, bool broadcast) {
  std::vector<int64_t> world(static_cast<size_t>(ranks.size()));
  std::iota(world.begin(), world.end(), 0);
  Agreement agreement;
  for (const auto& read : plan.tensors) {
    for (const auto* saved : read.saved) {
      const auto* meta = broadcast ? nullptr : dtensor_meta(source.tensor(saved->name));
      if (broadcast || meta) agreement.add(meta ? meta->spec->mesh().ranks() : world, saved->name);
    }
  }
  std::map<std::string, const DTensorMeta*> targets; // sorted: the ranks' states may have other orders
  for (const auto& read : plan.tensors) targets[read.name] = dtensor_meta(read.tensor);
  for (const auto& [name, meta] : targets) {
    if (meta) agreement.add(meta->spec->mesh().ranks(), "into " + name);
  }
  return agreement;
}

} // namespace

} // namespace tessera::internal

namespace tessera {

IncompatibleKeys load_state_dict(StateDict& target, const StateDict& source, const StateDictOptions& options) {
  const c10::NoGradGuard no_grad;
  const internal::Ranks ranks;
  const bool broadcast = options.broadcast_from_rank0;
  const auto contents = broadcast ? internal::contents_of_rank0(ranks, source) : internal::contents_of(source);
  const internal::Source from(ranks, source, broadcast);
  internal::LoadTarget into(target);
  const auto messages = ranks.all(internal::kStep, [&] {
    auto& plan = into.prepare(contents, {.cast = options.cast}, ranks.rank());
    internal::check_fits(plan, options.strict);
    internal::find_pieces(plan);
    if (from.is_here()) internal::check_readable(source);
    auto agreement = internal::agreement_on(plan, source, ranks, broadcast);
    into.add_settings(agreement);
    return agreement.to_message();
  });
  internal::Agreement::check(messages, ranks, internal::kStep, "gather or load other tensors");
  const auto& plan = into.plan();
  ranks.all(internal::kStep, [&] {
    if (from.is_here()) from.check_tied(plan);
  });
  if (!broadcast) internal::check_same_values(ranks, plan, source);
  for (const auto& read : plan.tensors) from.copy(read);
  into.finish();
  return {plan.missing, plan.unused};
}

IncompatibleKeys load_state_dict(torch::nn::Module& module, const StateDict& source, const StateDictOptions& options) {
  auto target = internal::read_on_all_ranks(internal::kStep, [&] { return state_dict(module, internal::own_options(options)); });
  return load_state_dict(target, source, options);
}

IncompatibleKeys load_state_dict(torch::nn::Module& module, torch::optim::Optimizer& optimizer, const StateDict& source,
                                 const StateDictOptions& options) {
  auto target =
      internal::read_on_all_ranks(internal::kStep, [&] { return state_dict(module, optimizer, internal::own_options(options)); });
  return load_state_dict(target, source, options);
}

IncompatibleKeys load_state_dict(torch::nn::Module& module, c10::ArrayRef<NamedOptimizer> optimizers, const StateDict& source,
                                 const StateDictOptions& options) {
  auto target = internal::read_on_all_ranks(internal::kStep,
                                            [&] { return state_dict(module, optimizers, internal::own_options(options)); });
  return load_state_dict(target, source, options);
}

} // namespace tessera
