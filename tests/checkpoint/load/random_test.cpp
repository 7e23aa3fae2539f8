// Checkpoints of states that are drawn at random: names, dtypes, shapes, bits and values; saved from random layouts by each way
// of saving, and loaded into others. TESSERA_TEST_FULL=1 takes all seeds; a failure names its seed.
#include <gmock/gmock.h>
#include <tessera/checkpoint/checkpoint.h>
#include <tessera/checkpoint/checkpointer.h>
#include <tessera/checkpoint/hugging_face.h>
#include <tessera/dtensor/api.h>
#include <tessera/dtensor/tensor/dtensor_impl.h>
#include <torch/torch.h>

#include <cstring>
#include <set>

#include <tessera/tests/checkpoint/shared_folder.h>
#include <tessera/tests/support/draw.h>
#include <tessera/tests/support/matchers.h>
#include <tessera/tests/support/sweep.h>
#include <tessera/tests/support/test_device.h>

namespace tessera::checkpoint::random_test {
namespace {

using at::Tensor;
using testing::Draw;
using testing::error_of;
using testing::SharedFolder;
using Sizes = std::vector<int64_t>;

constexpr int64_t kSeeds = 2000;
constexpr size_t kSubset = 20;

const std::vector<std::string> kNames{"a",
                                      "A",
                                      "a.b",
                                      "a/b",
                                      "a b",
                                      "ä.weight",
                                      "\xe4\xb8\xad",
                                      "\xf0\x9f\x98\x80",
                                      "a\"q",
                                      "a\\b",
                                      "a\nb",
                                      "..",
                                      "../x",
                                      ".hidden",
                                      "layers.0.w",
                                      "layers.10.w",
                                      "metadata__",
                                      "null",
                                      "0",
                                      "x\x01y",
                                      "a..b",
                                      "/abs",
                                      "%s%n",
                                      "step",
                                      "latest",
                                      "index.json",
                                      "a ",
                                      "shape",
                                      "optimizer.state"};
const std::vector<at::ScalarType> kDtypes{
    at::kBool,  at::kByte,   at::kChar,   at::kShort,  at::kInt,    at::kLong,          at::kHalf,        at::kBFloat16,
    at::kFloat, at::kDouble, at::kUInt16, at::kUInt32, at::kUInt64, at::kFloat8_e4m3fn, at::kFloat8_e5m2, at::kComplexFloat};
const std::vector<StateValue> kValues{true,
                                      int64_t{-1},
                                      std::numeric_limits<int64_t>::min(),
                                      0.1,
                                      -0.0,
                                      5e-324,
                                      std::numeric_limits<double>::infinity(),
                                      std::string(),
                                      std::string("nul\0in", 6),
                                      std::vector<int64_t>{},
                                      std::vector<int64_t>{std::numeric_limits<int64_t>::max(), 9007199254740993},
                                      std::vector<double>{1e23, -1.5},
                                      std::vector<std::string>{"1e999", "\xf0\x9f\x98\x80 \"q\" \\ \n"}};

// A tensor, or a value where `tensor` is undefined.
struct Item {
  std::string name;
  std::vector<std::string> aliases;
  Tensor tensor;
  StateValue value;
};

Tensor random_bits(Draw& draw, const Sizes& sizes, at::ScalarType dtype) {
  auto tensor = torch::zeros(sizes, dtype);
  auto* bytes = static_cast<uint8_t*>(tensor.mutable_data_ptr());
  for (size_t i = 0; i < tensor.nbytes(); ++i) bytes[i] = static_cast<uint8_t>(draw.below(dtype == at::kBool ? 2 : 256));
  return tensor;
}

Sizes random_sizes(Draw& draw) {
  Sizes sizes(static_cast<size_t>(draw.below(5)));
  for (auto& size : sizes) size = draw.chance(6) ? 0 : 1 + draw.below(sizes.size() > 2 ? 5 : 11);
  return draw.chance(2) ? Sizes{700, 400} : sizes; // longer than a block
}

std::vector<Item> random_items(Draw& draw) {
  std::set<std::string> taken;
  const auto name = [&] {
    for (;;) {
      auto text = draw.of(kNames) + (draw.chance(30) ? "." + draw.of(kNames) : "");
      if (taken.insert(text).second) return text;
    }
  };
  std::vector<Item> items(static_cast<size_t>(1 + draw.below(8)));
  for (auto& item : items) {
    item.name = name();
    if (draw.chance(20)) {
      item.value = draw.of(kValues);
    } else {
      item.tensor = random_bits(draw, random_sizes(draw), draw.of(kDtypes));
      if (draw.chance(15)) item.aliases.push_back(name());
    }
  }
  return items;
}

// A few meshes over all ranks, in one order and another.
const std::vector<DeviceMesh>& meshes() {
  static const std::vector<DeviceMesh> all = [] {
    const int64_t n = process_context().world_size();
    std::vector<Sizes> shapes{{n}, {n, 1}, {1, n}};
    if (n == 4) shapes.insert(shapes.end(), {{2, 2}, {1, 2, 2}});
    Sizes reversed(static_cast<size_t>(n));
    for (int64_t r = 0; r < n; ++r) reversed[r] = n - 1 - r;
    std::vector<DeviceMesh> made;
    for (const auto& shape : shapes) {
      made.push_back(init_device_mesh(testing::test_device_type(), shape));
      made.push_back(make_device_mesh(testing::test_device_type(), shape, reversed));
    }
    return made;
  }();
  return all;
}

// One dim of the mesh holds uneven ranges of the leading dims; the others split later dims, or nothing.
Placements random_ragged(Draw& draw, const Sizes& sizes, const Sizes& mesh) {
  const auto ragged = draw.below(std::ssize(mesh)), last = draw.below(std::ssize(sizes));
  int64_t left = 1;
  for (int64_t d = 0; d <= last; ++d) left *= sizes[d];
  Sizes extents;
  for (int64_t i = 0; i < mesh[ragged]; ++i) {
    extents.push_back(i == mesh[ragged] - 1 ? left : draw.below(left + 1));
    left -= extents.back();
  }
  Placements placements;
  for (int64_t m = 0; m < std::ssize(mesh); ++m) {
    const auto later = std::ssize(sizes) - last - 1;
    if (m == ragged) {
      placements.emplace_back(RaggedShard{last, extents});
    } else if (later > 0 && draw.chance(50)) {
      placements.emplace_back(Shard{last + 1 + draw.below(later)});
    } else {
      placements.emplace_back(Replicate{});
    }
  }
  return placements;
}

Placements random_placements(Draw& draw, const Sizes& sizes, const Sizes& mesh) {
  if (!sizes.empty() && draw.chance(25)) return random_ragged(draw, sizes, mesh);
  Placements placements;
  for (size_t m = 0; m < mesh.size(); ++m) {
    const auto kind = sizes.empty() ? 9 : draw.below(10);
    const auto dim = sizes.empty() ? 0 : draw.below(std::ssize(sizes));
    if (kind < 6) {
      placements.emplace_back(Shard{dim});
    } else if (kind < 8) {
      placements.emplace_back(StridedShard{dim, 2 + draw.below(3)});
    } else {
      placements.emplace_back(Replicate{});
    }
  }
  return placements;
}

// A tensor in some layout, with the one whose memory it shares, if there is one.
struct Laid {
  Tensor tensor, base;
  std::string how;
};

Laid lay_out_plain(Draw& draw, const Tensor& values) {
  const auto kind = values.dim() == 0 ? 2 : draw.below(3);
  if (kind == 0) return {values.transpose(0, -1).clone(at::MemoryFormat::Contiguous).transpose(0, -1), {}, "plain, transposed"};
  if (kind == 1) { // every second row
    auto sizes = values.sizes().vec();
    sizes[0] = 2 * sizes[0] + 3;
    const auto base = torch::zeros(sizes, values.options());
    auto rows = base.slice(0, 1, 1 + 2 * values.size(0), 2);
    rows.copy_(values);
    return {rows, base, "plain rows of another"};
  }
  return {values.clone(), {}, "plain"};
}

// Equal draws give equal layouts, whatever the values.
Laid lay_out(Draw& draw, const Tensor& values) {
  if (draw.chance(30)) return lay_out_plain(draw, values);
  const auto& mesh = draw.of(meshes());
  const auto sizes = values.sizes().vec();
  const auto distribute = [&](const Tensor& whole) {
    const auto placements = random_placements(draw, whole.sizes().vec(), mesh.shape());
    return std::pair(Tensor(distribute_tensor(whole, mesh, placements)), to_string(placements) + " on " + mesh.to_string());
  };
  // A view that moves data, and a gather, take at::index_select, which lacks these dtypes.
  const bool movable = !c10::isBarebonesUnsignedType(values.scalar_type());
  if (movable && sizes.size() >= 2 && draw.chance(25)) {
    const auto [whole, how] = distribute(values.transpose(0, 1).contiguous());
    return {whole.transpose(0, 1), {}, how + ", transposed"};
  }
  if (movable && !sizes.empty() && draw.chance(20)) {
    auto larger = sizes;
    larger[0] += 3;
    const auto base = torch::zeros(larger, values.options());
    base.slice(0, 1, 1 + sizes[0]).copy_(values);
    const auto [whole, how] = distribute(base);
    return {whole.slice(0, 1, 1 + sizes[0]), whole, how + ", rows of another"};
  }
  const auto [whole, how] = distribute(values.contiguous());
  return {whole, {}, how};
}

bool is_copy(const Laid& laid) {
  const auto* meta = internal::dtensor_meta(laid.tensor);
  return meta && meta->copied_at_version;
}

Tensor local_of(const Tensor& tensor) { return is_dtensor(tensor) ? DTensor(tensor.detach()).local() : tensor; }

// A conversion may give a NaN other bits, depending on where in memory it lies.
enum class NaNs { kAsBits, kEqual };

bool same_bits(const Tensor& actual, const Tensor& expected, NaNs nans) {
  const auto a = local_of(actual).cpu().contiguous(), b = local_of(expected).cpu().contiguous();
  if (nans == NaNs::kEqual && a.is_floating_point() && a.scalar_type() == b.scalar_type())
    return testing::tensors_equal(a.to(at::kDouble), b.to(at::kDouble));
  return a.sizes() == b.sizes() && a.scalar_type() == b.scalar_type() &&
         (a.numel() == 0 || std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0);
}

// Targets, and beside each what it should hold after the load, in the same layout.
struct Targets {
  std::vector<std::pair<Laid, Laid>> pairs;
  bool any_copy = false;

  Tensor add(int64_t layout_seed, const Tensor& expected) {
    const auto seed = static_cast<uint64_t>(layout_seed);
    Draw draw(seed), again(seed);
    pairs.emplace_back(lay_out(draw, torch::zeros_like(expected)), lay_out(again, expected));
    any_copy = any_copy || is_copy(pairs.back().first);
    return pairs.back().first.tensor;
  }
  void expect_loaded(NaNs nans) const {
    for (const auto& [actual, expected] : pairs) {
      EXPECT_TRUE(same_bits(actual.tensor, expected.tensor, nans))
          << expected.tensor.scalar_type() << expected.tensor.sizes() << " " << actual.how;
      if (actual.base.defined()) EXPECT_TRUE(same_bits(actual.base, expected.base, nans)) << "the base of " << actual.how;
    }
  }
};

const char* const kIsCopy = "this view of a DTensor could not alias it";

enum class Way { kSave, kOverwrite, kBackground, kHuggingFace };

void save_in_way(Way way, const StateDict& state, const std::filesystem::path& path, const std::vector<Laid>& laid) {
  if (way == Way::kHuggingFace) return save_hugging_face(state, path, {.max_file_bytes = 1000});
  if (way == Way::kOverwrite) {
    StateDict other;
    other.add("other", torch::ones({100}));
    save(other, path);
  }
  if (way != Way::kBackground) return save(state, path, {.overwrite = way == Way::kOverwrite});
  Checkpointer checkpointer;
  checkpointer.save(state, path);
  for (const auto& [tensor, base, how] : laid) local_of(tensor).zero_(); // what was saved is a copy
  checkpointer.wait();
}

Way save_items(Draw& draw, const std::vector<Item>& items, const std::filesystem::path& path) {
  const auto way = draw.of(std::vector{Way::kSave, Way::kOverwrite, Way::kBackground, Way::kHuggingFace});
  StateDict state;
  std::vector<Laid> laid;
  for (const auto& item : items) {
    if (item.tensor.defined()) {
      laid.push_back(lay_out(draw, item.tensor));
      state.add(item.name, laid.back().tensor, item.aliases);
    } else if (way != Way::kHuggingFace) {
      state.set(item.name, item.value);
    }
  }
  save_in_way(way, state, path, laid);
  EXPECT_TRUE(verify(path).empty());
  return way;
}

// Loads a part of the items, some under other names or as other dtypes, beside a tensor that the checkpoint lacks.
void expect_loads(Draw& draw, const std::vector<Item>& items, Way way, const std::filesystem::path& path) {
  const bool cast = draw.chance(20), rename = draw.chance(20), extra = draw.chance(20), part = draw.chance(20);
  StateDict state;
  Targets targets;
  std::map<std::string, std::string> saved_name;
  for (const auto& item : items) {
    if (part && draw.chance(40)) continue;
    if (!item.tensor.defined()) {
      if (way != Way::kHuggingFace)
        state.set(item.name,
                  std::visit([](const auto& value) { return StateValue(std::decay_t<decltype(value)>{}); }, item.value));
      continue;
    }
    const bool casts = cast && item.tensor.is_floating_point();
    const auto expected = casts ? item.tensor.to(draw.of(std::vector{at::kFloat, at::kDouble, at::kBFloat16})) : item.tensor;
    const auto name = rename ? "renamed." + std::to_string(saved_name.size()) : item.name;
    saved_name[name] = item.name;
    state.add(name, targets.add(draw.below(1 << 30), expected));
  }
  const auto unknown = torch::full({3}, 7.0);
  if (extra) state.add("not saved", unknown);
  LoadOptions options{.allow_missing = extra, .allow_unused = part, .cast = cast};
  if (rename) options.rename = [&](const std::string& name) { return saved_name.count(name) > 0 ? saved_name.at(name) : name; };
  LoadReport report;
  const auto error = error_of([&] { report = load(state, path, options); });
  if (targets.any_copy) {
    EXPECT_THAT(error, ::testing::HasSubstr(kIsCopy));
    return;
  }
  EXPECT_EQ(error, "no error");
  targets.expect_loaded(cast ? NaNs::kEqual : NaNs::kAsBits);
  EXPECT_EQ(report.missing, extra ? std::vector<std::string>{"not saved"} : std::vector<std::string>());
  EXPECT_TRUE((unknown == 7).all().item<bool>());
  for (const auto& item : items) {
    if (!item.tensor.defined() && state.contains(item.name)) EXPECT_EQ(state.value(item.name), item.value) << item.name;
  }
}

void expect_loads_in_memory(Draw& draw, const std::vector<Item>& items) {
  StateDict source, target;
  Targets targets;
  for (const auto& item : items) {
    if (!item.tensor.defined()) continue;
    if (c10::isBarebonesUnsignedType(item.tensor.scalar_type())) continue; // they would be gathered
    source.add(item.name, lay_out(draw, item.tensor).tensor);
    target.add(item.name, targets.add(draw.below(1 << 30), item.tensor));
  }
  const auto error = error_of([&] { load_state_dict(target, source); });
  if (targets.any_copy) {
    EXPECT_THAT(error, ::testing::HasSubstr(kIsCopy));
    return;
  }
  EXPECT_EQ(error, "no error");
  targets.expect_loaded(NaNs::kAsBits);
}

TEST(RandomCheckpoints, LoadIntoOtherLayoutsAsTheyWere) {
  std::vector<int64_t> seeds(kSeeds);
  std::iota(seeds.begin(), seeds.end(), 0);
  const torch::NoGradGuard no_grad;
  for (const auto seed : testing::sweep(seeds, kSubset)) {
    SCOPED_TRACE(c10::str("seed ", seed));
    const SharedFolder folder;
    Draw draw(static_cast<uint64_t>(seed));
    const auto items = random_items(draw);
    const auto way = save_items(draw, items, folder.path() / "c");
    SharedFolder::barrier();
    expect_loads(draw, items, way, folder.path() / "c");
    expect_loads_in_memory(draw, items);
  }
}

} // namespace
} // namespace tessera::checkpoint::random_test
