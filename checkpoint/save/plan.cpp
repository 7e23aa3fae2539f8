#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <tessera/checkpoint/bytes/checksum.h>
#include <tessera/checkpoint/formats/safetensors.h>
#include <tessera/checkpoint/save/plan.h>

#include <algorithm>
#include <map>
#include <unordered_map>

namespace tessera::internal {

namespace {

// One part of a tensor and the ranks that hold it.
struct Shared {
  Box box;
  std::vector<int> ranks;
};

// All that is known of a tensor while the ranks are merged.
struct Merged {
  Holding what;
  int first_rank = 0;
  std::map<Box, std::vector<int>> holders; // ranks, ascending
};

// Tensors of one name on different meshes are no replicas: the weights of two pipeline stages, for example.
[[noreturn]] void fail_on_meshes(const std::string& name, const std::vector<std::vector<Holding>>& ranks,
                                 const RankNumbers& numbers) {
  std::map<std::string, std::vector<int64_t>> holders; // mesh → ranks
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    for (const auto& holding : ranks[rank]) {
      if (holding.name == name) holders[holding.mesh].push_back(numbers[rank]);
    }
  }
  std::string text;
  for (const auto& [mesh, on] : holders) {
    text += "\n  " + (mesh.empty() ? "plain, without a mesh" : mesh) + ": " + describe_ranks(on);
  }
  TORCH_CHECK(
      false, "checkpoint: tensor \"", name, "\" lies on several meshes, so its holders have no parts of one tensor:", text,
      "\nReplicas with the same values belong on one mesh of all these ranks, with Replicate() along its other dim; different "
      "tensors need a name each, as the stages of a pipeline get from StateDictOptions::prefix");
}

void merge(Merged& merged, const Holding& holding, int rank, const RankNumbers& numbers) {
  const auto& known = merged.what;
  TORCH_CHECK(known.dtype == holding.dtype && known.sizes == holding.sizes, "checkpoint: tensor \"", holding.name, "\" is ",
              c10::toString(known.dtype), at::IntArrayRef(known.sizes), " on rank ", numbers[merged.first_rank], " and ",
              c10::toString(holding.dtype), at::IntArrayRef(holding.sizes), " on rank ", numbers[rank],
              holding.mesh.empty() ? "; what follows each rank's part must be a DTensor (of an optimizer's state: "
                                     "StateLayout::kAsParameter or kReplicated)"
                                   : "");
  TORCH_CHECK(known.aliases == holding.aliases, "checkpoint: tensor \"", holding.name, "\" is tied to other names on rank ",
              numbers[rank], " than on rank ", numbers[merged.first_rank]);
  for (const auto& box : holding.boxes) {
    TORCH_CHECK(fits(box, holding.sizes), "checkpoint: tensor \"", holding.name, "\": rank ", numbers[rank], " holds ",
                to_string(box), " of a tensor of shape ", at::IntArrayRef(holding.sizes));
    merged.holders[box].push_back(rank);
  }
}

void check_cover(const Merged& merged, const std::vector<Shared>& parts, const RankNumbers& numbers) {
  const auto& what = merged.what;
  std::vector<const Box*> boxes;
  int64_t covered = 0;
  for (const auto& part : parts) {
    boxes.push_back(&part.box);
    covered += part.box.numel();
  }
  if (const auto both = find_overlap(boxes)) {
    const auto &a = parts[both->first], &b = parts[both->second];
    TORCH_CHECK(false, "checkpoint: tensor \"", what.name, "\": rank ", numbers[a.ranks[0]], " holds ", to_string(a.box),
                " and rank ", numbers[b.ranks[0]], " holds ", to_string(b.box), ", which overlap");
  }
  const auto numel = whole(what.sizes).numel();
  TORCH_CHECK(covered == numel, "checkpoint: tensor \"", what.name, "\": the ranks hold ", covered, " of its ", numel,
              " elements; it lies on ", what.mesh);
}

std::vector<Shared> shared_parts(const Merged& merged, const RankNumbers& numbers) {
  std::vector<Shared> parts;
  if (whole(merged.what.sizes).numel() == 0) return {{whole(merged.what.sizes), {merged.first_rank}}};
  for (const auto& [box, ranks] : merged.holders) {
    parts.push_back({box, merged.what.mesh.empty() ? std::vector<int>{ranks.front()} : ranks});
  }
  check_cover(merged, parts, numbers);
  return parts;
}

std::vector<Merged> merge_tensors(const std::vector<std::vector<Holding>>& ranks, const RankNumbers& numbers) {
  std::vector<Merged> tensors;
  std::unordered_map<std::string, size_t> index;
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    for (const auto& holding : ranks[rank]) {
      const auto [found, is_new] = index.emplace(holding.name, tensors.size());
      if (is_new) tensors.push_back({holding, static_cast<int>(rank), {}});
      if (tensors[found->second].what.mesh != holding.mesh) fail_on_meshes(holding.name, ranks, numbers);
      merge(tensors[found->second], holding, static_cast<int>(rank), numbers);
    }
  }
  return tensors;
}

// Largest parts first, each to the holder with the least to write.
void assign(std::vector<SavePlan::Tensor>& tensors, const std::vector<std::vector<Shared>>& parts, size_t rank_count) {
  struct Item {
    int64_t bytes;
    size_t tensor, part;
  };
  std::vector<Item> items;
  for (size_t t = 0; t < tensors.size(); ++t) {
    tensors[t].parts.resize(parts[t].size());
    for (size_t p = 0; p < parts[t].size(); ++p) {
      items.push_back({parts[t][p].box.numel() * static_cast<int64_t>(c10::elementSize(tensors[t].what.dtype)), t, p});
    }
  }
  // Parts with one holder come first: they are no choice, and the others even out what they leave.
  std::stable_sort(items.begin(), items.end(), [&](const Item& a, const Item& b) {
    const bool a_free = parts[a.tensor][a.part].ranks.size() > 1, b_free = parts[b.tensor][b.part].ranks.size() > 1;
    return a_free != b_free ? b_free : a.bytes > b.bytes;
  });
  std::vector<int64_t> load(rank_count, 0);
  for (const auto& item : items) {
    const auto& part = parts[item.tensor][item.part];
    const auto least = *std::min_element(part.ranks.begin(), part.ranks.end(), [&](int a, int b) { return load[a] < load[b]; });
    load[least] += item.bytes;
    tensors[item.tensor].parts[item.part] = {part.box, least};
  }
}

Json boxes_to_json(const std::vector<Box>& boxes) {
  auto json = Json::array();
  for (const auto& box : boxes) json.push_back({box.offsets, box.sizes});
  return json;
}

} // namespace

Json to_json(const std::vector<Holding>& tensors) {
  auto json = Json::array();
  for (const auto& t : tensors) {
    json.push_back({t.name, t.aliases, safetensors_dtype(t.dtype, t.name), t.sizes, t.layout, t.mesh, boxes_to_json(t.boxes)});
  }
  return json;
}

std::vector<Holding> holdings_from_json(const JsonView& json) {
  std::vector<Holding> tensors;
  for (const auto& tensor : json.elements()) {
    const auto fields = tensor.elements();
    Holding holding;
    holding.name = fields.at(0).string();
    holding.aliases = fields.at(1).strings();
    holding.dtype = dtype_from_safetensors(fields.at(2).string(), holding.name);
    holding.sizes = fields.at(3).non_negatives();
    holding.layout = fields.at(4).string();
    holding.mesh = fields.at(5).string();
    for (const auto& box : fields.at(6).elements()) {
      holding.boxes.push_back({box.elements().at(0).non_negatives(), box.elements().at(1).non_negatives()});
    }
    tensors.push_back(std::move(holding));
  }
  return tensors;
}

Json to_json(const StateValues& values) {
  auto json = Json::array();
  for (const auto& [name, value] : values) json.push_back({name, to_json(value)});
  return json;
}

StateValues values_from_json(const JsonView& json) {
  StateValues values;
  for (const auto& value : json.elements()) {
    values.emplace_back(value.elements().at(0).string(), state_value_from_json(value.elements().at(1)));
  }
  return values;
}

std::vector<SavePlan::Tensor> plan_tensors(const std::vector<std::vector<Holding>>& ranks, const RankNumbers& numbers) {
  const auto merged = merge_tensors(ranks, numbers);
  std::vector<SavePlan::Tensor> tensors;
  std::vector<std::vector<Shared>> parts;
  for (const auto& tensor : merged) {
    parts.push_back(shared_parts(tensor, numbers));
    tensors.push_back({tensor.what, {}});
    tensors.back().what.boxes.clear();
  }
  assign(tensors, parts, ranks.size());
  return tensors;
}

StateValues merge_values(const std::vector<StateValues>& ranks, const RankNumbers& numbers) {
  StateValues values;
  std::unordered_map<std::string, std::pair<size_t, size_t>> index; // name → position, first rank
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    for (const auto& [name, value] : ranks[rank]) {
      const auto [found, is_new] = index.emplace(name, std::pair(values.size(), rank));
      if (is_new) values.emplace_back(name, value);
      const auto& first = values[found->second.first].second;
      TORCH_CHECK(is_same(first, value), "checkpoint: value \"", name, "\" is ", to_text(to_json(first)), " on rank ",
                  numbers[found->second.second], " and ", to_text(to_json(value)), " on rank ", numbers[rank]);
    }
  }
  return values;
}

void check_names(const SavePlan& plan) {
  std::unordered_map<std::string, const char*> kinds;
  const auto claim = [&](const std::string& name, const char* kind) {
    const auto [found, is_new] = kinds.emplace(name, kind);
    TORCH_CHECK(is_new, "checkpoint: \"", name, "\" is ", found->second, " on one rank and ", kind, " on another");
  };
  for (const auto& tensor : plan.tensors) claim(tensor.what.name, "a tensor");
  for (const auto& tensor : plan.tensors) {
    for (const auto& alias : tensor.what.aliases) claim(alias, "a tied name");
  }
  for (const auto& [name, value] : plan.values) claim(name, "a value");
}

namespace {

constexpr auto kExchange = "exchange what the ranks hold";

// Plans anew what `own` holds of this rank's state, from the states of all ranks.
void merge(SavePlan& plan, const Ranks& ranks, const Json& own) {
  const std::string source = "checkpoint: a rank's message";
  std::vector<std::vector<Holding>> tensors;
  std::vector<StateValues> values;
  for (const auto& text : ranks.all(kExchange, [&] { return dump_json(own, source); })) {
    const auto json = parse_json(text, source);
    const JsonView state(json, source);
    if (own.contains("tensors")) tensors.push_back(holdings_from_json(state["tensors"]));
    if (own.contains("values")) values.push_back(values_from_json(state["values"]));
  }
  if (!tensors.empty()) plan.tensors = plan_tensors(tensors, ranks.numbers());
  if (!values.empty()) plan.values = merge_values(values, ranks.numbers());
}

} // namespace

const SavePlan& Planner::plan(const Ranks& ranks, const RankState& state) {
  const auto tensors = to_json(state.tensors), values = to_json(state.values);
  uint64_t own_tensors = 0;
  const auto summaries = ranks.all(kExchange, [&] { // "=" while the tensors are those of the plan, and the values' checksum
    own_tensors = checksum(dump_json(tensors, "the names of the state"));
    const bool same = has_plan_ && own_tensors == own_tensors_;
    return (same ? "=" : "!") + to_hex(checksum(dump_json(values, "the values of the state")));
  });
  const auto first_values = summaries[0].substr(1);
  const bool same_tensors = std::ranges::all_of(summaries, [](const auto& summary) { return summary.starts_with('='); });
  const bool same_values = std::ranges::all_of(summaries, [&](const auto& summary) { return summary.ends_with(first_values); });
  Json details = Json::object();
  if (!same_tensors) details["tensors"] = tensors;
  if (!same_values) details["values"] = values;
  has_plan_ = false; // until all below has succeeded
  if (!details.empty()) merge(plan_, ranks, details);
  if (same_values) plan_.values = state.values;
  check_names(plan_);
  own_tensors_ = own_tensors;
  has_plan_ = true;
  return plan_;
}

} // namespace tessera::internal
