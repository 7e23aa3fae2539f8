#include <c10/util/Exception.h>
#include <tessera/checkpoint/pieces.h>
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

// Boxes sorted by their offset in dim 0 can only overlap until the first one that starts after their end.
void check_cover(const Merged& merged, const std::vector<Shared>& parts) {
  const auto& what = merged.what;
  int64_t covered = 0;
  for (size_t i = 0; i < parts.size(); ++i) {
    covered += parts[i].box.numel();
    for (size_t j = i + 1; j < parts.size() && !what.sizes.empty(); ++j) {
      if (parts[j].box.offsets[0] >= parts[i].box.offsets[0] + parts[i].box.sizes[0]) break;
      TORCH_CHECK(!intersect(parts[i].box, parts[j].box), "checkpoint: tensor \"", what.name, "\": rank ", parts[i].ranks[0],
                  " holds ", to_string(parts[i].box), " and rank ", parts[j].ranks[0], " holds ", to_string(parts[j].box),
                  ", which overlap");
    }
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

std::vector<Merged> merge_tensors(const std::vector<RankState>& ranks) {
  std::vector<Merged> tensors;
  std::unordered_map<std::string, size_t> index;
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    for (const auto& holding : ranks[rank].tensors) {
      const auto [found, is_new] = index.emplace(holding.name, tensors.size());
      if (is_new) tensors.push_back({holding, static_cast<int>(rank), {}});
      merge(tensors[found->second], holding, static_cast<int>(rank));
    }
  }
  return tensors;
}

std::vector<std::pair<std::string, StateValue>> merge_values(const std::vector<RankState>& ranks,
                                                             const std::vector<Merged>& tensors) {
  std::vector<std::pair<std::string, StateValue>> values;
  std::unordered_map<std::string, std::pair<size_t, size_t>> index; // name → position, first rank
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    for (const auto& [name, value] : ranks[rank].values) {
      const auto [found, is_new] = index.emplace(name, std::pair(values.size(), rank));
      if (is_new) values.emplace_back(name, value);
      // Compared as text, where NaN equals itself.
      TORCH_CHECK(to_json(values[found->second.first].second) == to_json(value), "checkpoint: value \"", name, "\" is ",
                  to_json(values[found->second.first].second).dump(), " on rank ", found->second.second, " and ",
                  to_json(value).dump(), " on rank ", rank);
    }
  }
  for (const auto& tensor : tensors) {
    TORCH_CHECK(!index.count(tensor.what.name), "checkpoint: \"", tensor.what.name,
                "\" is a tensor on one rank and a value on another");
  }
  return values;
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

RankState describe(const StateDict& state) {
  RankState described;
  for (const auto& entry : state.entries()) {
    if (!entry.is_tensor()) {
      described.values.emplace_back(entry.name, std::get<StateValue>(entry.content));
      continue;
    }
    const auto& tensor = std::get<at::Tensor>(entry.content);
    Holding holding{entry.name, entry.aliases, tensor.scalar_type(), tensor.sizes().vec(), layout_of(tensor), true, {}};
    holding.plain = holding.layout == "plain";
    safetensors_dtype(holding.dtype, "checkpoint: tensor \"" + entry.name + "\"");
    for (auto& piece : pieces_of(entry.name, tensor)) holding.boxes.push_back(std::move(piece.box));
    described.tensors.push_back(std::move(holding));
  }
  return described;
}

Json to_json(const RankState& state) {
  auto tensors = Json::array(), values = Json::array();
  for (const auto& t : state.tensors) {
    tensors.push_back(
        {t.name, t.aliases, safetensors_dtype(t.dtype, t.name), t.sizes, t.layout, t.plain, boxes_to_json(t.boxes)});
  }
  for (const auto& [name, value] : state.values) values.push_back({name, to_json(value)});
  return {{"tensors", std::move(tensors)}, {"values", std::move(values)}};
}

RankState rank_state_from_json(const JsonView& json) {
  RankState state;
  for (const auto& tensor : json["tensors"].elements()) {
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
    state.tensors.push_back(std::move(holding));
  }
  for (const auto& value : json["values"].elements()) {
    state.values.emplace_back(value.elements().at(0).string(), state_value_from_json(value.elements().at(1)));
  }
  return state;
}

SavePlan plan_save(const std::vector<RankState>& ranks) {
  const auto merged = merge_tensors(ranks);
  SavePlan plan;
  plan.values = merge_values(ranks, merged);
  std::vector<std::vector<Shared>> parts;
  for (const auto& tensor : merged) {
    parts.push_back(shared_parts(tensor));
    plan.tensors.push_back({tensor.what, {}});
    plan.tensors.back().what.boxes.clear();
  }
  assign(plan.tensors, parts, ranks.size());
  return plan;
}

} // namespace tessera::checkpoint
