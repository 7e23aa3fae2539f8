#include <c10/util/Exception.h>
#include <tessera/checkpoint/checksum.h>
#include <tessera/checkpoint/plan.h>
#include <tessera/checkpoint/safetensors.h>

#include <algorithm>
#include <map>
#include <unordered_map>

namespace tessera::checkpoint {

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
  std::map<std::pair<std::vector<int64_t>, std::vector<int64_t>>, std::vector<int>> holders; // box → ranks, ascending
};

void merge(Merged& merged, const Holding& holding, int rank) {
  const auto& known = merged.what;
  TORCH_CHECK(known.dtype == holding.dtype && known.sizes == holding.sizes, "checkpoint: tensor \"", holding.name, "\" is ",
              c10::toString(known.dtype), at::IntArrayRef(known.sizes), " on rank ", merged.first_rank, " and ",
              c10::toString(holding.dtype), at::IntArrayRef(holding.sizes), " on rank ", rank);
  TORCH_CHECK(known.aliases == holding.aliases, "checkpoint: tensor \"", holding.name, "\" is tied to other names on rank ", rank,
              " than on rank ", merged.first_rank);
  for (const auto& box : holding.boxes) {
    TORCH_CHECK(fits(box, holding.sizes), "checkpoint: tensor \"", holding.name, "\": rank ", rank, " holds ", to_string(box),
                " of a tensor of shape ", at::IntArrayRef(holding.sizes));
    merged.holders[{box.offsets, box.sizes}].push_back(rank);
  }
}

void check_cover(const Merged& merged, const std::vector<Shared>& parts) {
  const auto& what = merged.what;
  std::vector<const Box*> boxes;
  int64_t covered = 0;
  for (const auto& part : parts) {
    boxes.push_back(&part.box);
    covered += part.box.numel();
  }
  if (const auto both = find_overlap(boxes)) {
    const auto &a = parts[both->first], &b = parts[both->second];
    TORCH_CHECK(false, "checkpoint: tensor \"", what.name, "\": rank ", a.ranks[0], " holds ", to_string(a.box), " and rank ",
                b.ranks[0], " holds ", to_string(b.box), ", which overlap");
  }
  const auto numel = whole(what.sizes).numel();
  TORCH_CHECK(covered == numel, "checkpoint: tensor \"", what.name, "\": the ranks hold ", covered, " of its ", numel,
              " elements");
}

std::vector<Shared> shared_parts(const Merged& merged) {
  std::vector<Shared> parts;
  if (whole(merged.what.sizes).numel() == 0) return {{whole(merged.what.sizes), {merged.first_rank}}};
  for (const auto& [box, ranks] : merged.holders) {
    parts.push_back({{box.first, box.second}, merged.what.plain ? std::vector<int>{ranks.front()} : ranks});
  }
  check_cover(merged, parts);
  return parts;
}

std::vector<Merged> merge_tensors(const std::vector<std::vector<Holding>>& ranks) {
  std::vector<Merged> tensors;
  std::unordered_map<std::string, size_t> index;
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    for (const auto& holding : ranks[rank]) {
      const auto [found, is_new] = index.emplace(holding.name, tensors.size());
      if (is_new) tensors.push_back({holding, static_cast<int>(rank), {}});
      merge(tensors[found->second], holding, static_cast<int>(rank));
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

// What `make` returns on every rank, read by `read`. An error in `make` is an error on every rank.
template <typename Make, typename Read>
auto exchange(const Ranks& ranks, const Make& make, const Read& read) {
  const std::string source = "checkpoint: a rank's message";
  std::vector<std::decay_t<decltype(read(JsonView(Json(), source)))>> all;
  for (const auto& text : ranks.all("exchange what the ranks hold", [&] { return dump_json(make(), source); })) {
    const auto json = parse_json(text, source);
    all.push_back(read(JsonView(json, source)));
  }
  return all;
}

// Names and aliases must differ, or the checkpoint could not be read.
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

// What a rank tells the others before they exchange more.
struct Summary {
  bool same_tensors; // as when the plan was made
  std::string values;
};

} // namespace

Json to_json(const std::vector<Holding>& tensors) {
  auto json = Json::array();
  for (const auto& t : tensors) {
    json.push_back({t.name, t.aliases, safetensors_dtype(t.dtype, t.name), t.sizes, t.layout, t.plain, boxes_to_json(t.boxes)});
  }
  return json;
}

std::vector<Holding> holdings_from_json(const JsonView& json) {
  std::vector<Holding> tensors;
  for (const auto& tensor : json.elements()) {
    const auto fields = tensor.elements();
    Holding holding;
    holding.name = fields.at(0).string();
    for (const auto& alias : fields.at(1).elements()) holding.aliases.push_back(alias.string());
    holding.dtype = dtype_from_safetensors(fields.at(2).string(), holding.name);
    holding.sizes = fields.at(3).non_negatives();
    holding.layout = fields.at(4).string();
    holding.plain = fields.at(5).boolean();
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

std::vector<SavePlan::Tensor> plan_tensors(const std::vector<std::vector<Holding>>& ranks) {
  const auto merged = merge_tensors(ranks);
  std::vector<SavePlan::Tensor> tensors;
  std::vector<std::vector<Shared>> parts;
  for (const auto& tensor : merged) {
    parts.push_back(shared_parts(tensor));
    tensors.push_back({tensor.what, {}});
    tensors.back().what.boxes.clear();
  }
  assign(tensors, parts, ranks.size());
  return tensors;
}

StateValues merge_values(const std::vector<StateValues>& ranks) {
  StateValues values;
  std::unordered_map<std::string, std::pair<size_t, size_t>> index; // name → position, first rank
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    for (const auto& [name, value] : ranks[rank]) {
      const auto [found, is_new] = index.emplace(name, std::pair(values.size(), rank));
      if (is_new) values.emplace_back(name, value);
      // Compared as text, where NaN equals itself.
      const auto first = to_json(values[found->second.first].second).dump(), here = to_json(value).dump();
      TORCH_CHECK(first == here, "checkpoint: value \"", name, "\" is ", first, " on rank ", found->second.second, " and ", here,
                  " on rank ", rank);
    }
  }
  return values;
}

const SavePlan& Planner::plan(const Ranks& ranks, const RankState& state) {
  const auto tensors = to_json(state.tensors), values = to_json(state.values);
  uint64_t own_tensors = 0;
  const auto summarize = [&]() -> Json {
    own_tensors = checksum(dump_json(tensors, "the names of the state"));
    return {{"same", has_plan_ && own_tensors == own_tensors_},
            {"values", to_hex(checksum(dump_json(values, "the values of the state")))}};
  };
  const auto summaries = exchange(ranks, summarize, [](const JsonView& json) {
    return Summary{json["same"].boolean(), json["values"].string()};
  });
  const bool same_tensors = std::all_of(summaries.begin(), summaries.end(), [](const Summary& s) { return s.same_tensors; });
  const bool same_values =
      std::all_of(summaries.begin(), summaries.end(), [&](const Summary& s) { return s.values == summaries[0].values; });
  Json details = Json::object();
  if (!same_tensors) details["tensors"] = tensors;
  if (!same_values) details["values"] = values;
  has_plan_ = false; // until all below has succeeded
  if (!details.empty()) {
    const auto read = [&](const JsonView& json) {
      return RankState{same_tensors ? std::vector<Holding>() : holdings_from_json(json["tensors"]),
                       same_values ? StateValues() : values_from_json(json["values"])};
    };
    const auto all = exchange(
        ranks, [&] { return details; }, read);
    std::vector<std::vector<Holding>> tensors_of;
    std::vector<StateValues> values_of;
    for (const auto& rank : all) {
      tensors_of.push_back(rank.tensors);
      values_of.push_back(rank.values);
    }
    if (!same_tensors) plan_.tensors = plan_tensors(tensors_of);
    if (!same_values) plan_.values = merge_values(values_of);
  }
  if (same_values) plan_.values = state.values;
  check_names(plan_);
  own_tensors_ = own_tensors;
  has_plan_ = true;
  return plan_;
}

} // namespace tessera::checkpoint
