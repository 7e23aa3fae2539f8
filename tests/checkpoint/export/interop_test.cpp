// Our files, read by the safetensors package and by PyTorch's distributed checkpoint; theirs, read by us.
#include <gtest/gtest.h>
#include <tessera/checkpoint/checkpoint.h>
#include <tessera/checkpoint/hugging_face.h>
#include <tessera/dtensor/api.h>
#include <tessera/dtensor/layout/sharding_math.h>
#include <torch/torch.h>

#include <tessera/tests/checkpoint/shared_folder.h>
#include <tessera/tests/support/line_mesh.h>
#include <tessera/tests/support/matchers.h>
#include <tessera/tests/support/subprocess.h>

namespace tessera::checkpoint::interop_test {
namespace {

using testing::line_mesh;
using testing::SharedFolder;

struct Described {
  std::string name;
  const char* python_dtype;
  at::ScalarType dtype;
  std::vector<int64_t> sizes;
};

const std::vector<Described> kTensors{
    {"matrix", "float32", at::kFloat, {7, 9}}, {"cube", "bfloat16", at::kBFloat16, {7, 9, 2}},
    {"rows", "float64", at::kDouble, {5, 3}},  {"counts", "int64", at::kLong, {3, 5}},
    {"halves", "float16", at::kHalf, {4}},     {"whole", "int32", at::kInt, {2, 2}},
    {"bytes", "uint8", at::kByte, {3}},        {"small", "int8", at::kChar, {1, 2}},
    {"short", "int16", at::kShort, {6}},       {"scalar", "float32", at::kFloat, {}},
};

// Of these Python has no storage class. The names are interop.py's.
const std::vector<std::pair<std::string, at::ScalarType>> kNewDtypes{
    {"new.uint16", at::kUInt16}, {"new.float8_e4m3fn", at::kFloat8_e4m3fn}, {"new.float8_e5m2", at::kFloat8_e5m2}};

at::Tensor expected(const Described& tensor) {
  return torch::arange(c10::multiply_integers(tensor.sizes)).remainder(120).view(tensor.sizes).to(tensor.dtype);
}

// Each tensor under another placement in turn; ragged ones cut within rows.
Placements placement(size_t position, const Described& tensor) {
  const int64_t n = process_context().world_size();
  if (tensor.sizes.size() < 2) return {Replicate{}};
  if (position % 3 == 0) return {Shard{0}};
  if (position % 3 == 1) return {Shard{1}};
  const auto elements = tensor.sizes[0] * tensor.sizes[1];
  std::vector<int64_t> extents(static_cast<size_t>(n), elements / n);
  extents.back() += elements % n;
  return {RaggedShard{1, extents}};
}

// Sharded tensors of the list, with their values or zeros; one of them plain.
StateDict sharded_state(bool filled) {
  const auto mesh = line_mesh();
  StateDict state;
  for (size_t i = 0; i < kTensors.size(); ++i) {
    const auto full = filled ? expected(kTensors[i]) : torch::zeros(kTensors[i].sizes, kTensors[i].dtype);
    state.add(kTensors[i].name,
              kTensors[i].name == "whole" ? full : at::Tensor(distribute_tensor(full, mesh, placement(i, kTensors[i]))));
  }
  return state;
}

// Each tensor with dims split along one of them in turn, and what is left as a ragged layout does: cut within rows.
StateDict ragged_parts() {
  const int64_t n = process_context().world_size(), outer = n % 2 == 0 ? 2 : 1;
  const auto mesh = init_device_mesh(testing::test_device_type(), {outer, n / outer}, {"tp", "dp"});
  StateDict state;
  for (size_t i = 0; i < kTensors.size(); ++i) {
    const auto dims = static_cast<int64_t>(kTensors[i].sizes.size());
    Placements placements{Replicate{}, Replicate{}};
    if (dims > 0) {
      const auto split = static_cast<int64_t>(i) % dims;
      placements[0] = i < 2 ? Placement(Shard{split}) : StridedShard{split, 2};
      const auto elements = internal::largest_positions(kTensors[i].sizes, mesh.shape(), {placements[0]}, dims - 1);
      RaggedShard ragged{dims - 1, {}};
      ragged.extents.append(n / outer - 1, elements / mesh.size(1));
      ragged.extents.append(1, elements - ragged.extents.sum_before(ragged.extents.size()));
      placements[1] = ragged;
    }
    state.add(kTensors[i].name, at::Tensor(distribute_tensor(expected(kTensors[i]), mesh, placements)));
  }
  return state;
}

void expect_filled(const StateDict& state) {
  for (const auto& tensor : kTensors) {
    SCOPED_TRACE(tensor.name);
    const auto& actual = state.tensor(tensor.name);
    EXPECT_TENSORS_EQUAL(is_dtensor(actual) ? DTensor(actual).full_tensor() : actual, expected(tensor));
  }
}

std::string described(const Described& tensor) {
  return tensor.name + ":" + tensor.python_dtype + ":" + c10::Join(",", tensor.sizes);
}

// Runs interop.py on rank 0 while the others wait. The words of `before` are of a script that runs it.
void run_python(std::vector<std::string> arguments, std::vector<std::string> before = {}) {
  SharedFolder::barrier();
  if (process_context().rank() == 0) {
    arguments.insert(arguments.begin(), {TESSERA_PYTHON, TESSERA_INTEROP_SCRIPT});
    arguments.insert(arguments.begin(), before.begin(), before.end());
    for (const auto& tensor : kTensors) arguments.push_back(described(tensor));
    const auto result = testing::run_program(arguments, {}, std::chrono::seconds(200));
    EXPECT_EQ(result.status, 0) << result.output;
    if (result.status == 0) std::printf("%s", result.output.c_str());
  }
  SharedFolder::barrier();
}

// The same for a command that writes into a folder, which is the same each time.
void write_in_python(const std::string& command, const std::filesystem::path& folder) {
  std::vector<std::string> remembered{TESSERA_PYTHON, TESSERA_REMEMBERED_SCRIPT, "--key", command};
  for (const auto& tensor : kTensors) remembered.insert(remembered.end(), {"--key", described(tensor)});
  remembered.insert(remembered.end(), {"--folder", folder, "--"});
  run_python({command, folder}, remembered);
}

TEST(Interop, PythonReadsWhatWeWrite) {
  const SharedFolder folder;
  save(sharded_state(true), folder.path() / "c");
  run_python({"check", folder.path() / "c"});
}

TEST(Interop, PythonReadsRangesOfPartsThatWeWrite) {
  const SharedFolder folder;
  save(ragged_parts(), folder.path() / "c");
  run_python({"check", folder.path() / "c"});
  auto state = sharded_state(false);
  load(state, folder.path() / "c");
  expect_filled(state);
}

TEST(Interop, PythonReadsTheHuggingFaceFoldersWeWrite) {
  const SharedFolder folder;
  save_hugging_face(sharded_state(true), folder.path() / "one");
  EXPECT_TRUE(std::filesystem::exists(folder.path() / "one" / "model.safetensors"));
  HuggingFaceOptions options;
  options.max_file_bytes = 200;
  save_hugging_face(sharded_state(true), folder.path() / "several", options);
  EXPECT_TRUE(std::filesystem::exists(folder.path() / "several" / "model.safetensors.index.json"));
  run_python({"check-hugging-face", folder.path() / "one", folder.path() / "several"});
  for (const auto* name : {"one", "several"}) {
    auto state = sharded_state(false);
    load(state, folder.path() / name);
    expect_filled(state);
  }
}

TEST(Interop, WeReadWhatPythonWrites) {
  const SharedFolder folder;
  write_in_python("write", folder.path() / "python");
  for (const std::string format : {"dcp-safetensors", "dcp"}) {
    const auto path = folder.path() / "python" / format;
    for (const auto* ranks : {"1", "2", "4"}) {
      SCOPED_TRACE(format + " by " + ranks);
      auto state = sharded_state(false);
      if (format == "dcp") {
        state.set("step", 0);
        state.set("nested.rate", 0.0);
        state.set("nested.names", StateValue(std::vector<std::string>{}));
        for (const auto& [name, dtype] : kNewDtypes) state.add(name, torch::zeros({5}, dtype));
      }
      load(state, path / ranks);
      expect_filled(state);
      if (process_context().rank() == 0) std::printf("%s, written by %s ranks: read bit for bit\n", format.c_str(), ranks);
      EXPECT_EQ(state.contains("step") ? state.value<int64_t>("step") : 7, 7);
      for (const auto& [name, dtype] : kNewDtypes) {
        if (state.contains(name)) EXPECT_TENSORS_EQUAL(state.tensor(name).to(at::kFloat), torch::arange(5).to(at::kFloat));
      }
    }
  }
}

TEST(Interop, WhatWeCannotReadOfTorchSaveIsPassedOverOrAnError) {
  const SharedFolder folder;
  const auto path = folder.path() / "c";
  write_in_python("write-torch", path);
  StateDict state;
  state.add("w", torch::zeros({3}));
  state.set("step", 0);
  load(state, path / "objects.pt");
  EXPECT_TENSORS_EQUAL(state.tensor("w"), torch::arange(3).to(at::kFloat));
  EXPECT_EQ(state.value<int64_t>("step"), 7);
  for (const auto* name : {"conj.pt", "neg.pt"}) {
    EXPECT_THROWS_WITH(load(state, path / name), "\"w\" is stored as a conjugate or negative view");
  }
  EXPECT_THROWS_WITH(load(state, path / "zipped.pt"), "\"w\": its data is compressed");
}

TEST(Interop, WeReadHuggingFaceFolders) {
  const SharedFolder folder;
  const auto path = folder.path() / "c";
  write_in_python("write-hugging-face", path);
  auto state = sharded_state(false);
  load(state, path);
  expect_filled(state);

  // One of its files alone, under other names, in another dtype.
  StateDict renamed;
  renamed.add("model.matrix", torch::zeros({7, 9}, at::kDouble));
  LoadOptions options;
  options.rename = [](const std::string& name) { return name.substr(6); };
  options.allow_unused = true;
  EXPECT_THROWS_WITH(load(renamed, path / "model-00001-of-00002.safetensors", options),
                     "saved as Float[7, 9], to be loaded into Double[7, 9]");
  options.cast = true;
  load(renamed, path / "model-00001-of-00002.safetensors", options);
  EXPECT_TENSORS_EQUAL(renamed.tensor("model.matrix"), expected(kTensors[0]).to(at::kDouble));

  SharedFolder::barrier();
  if (process_context().rank() == 0) std::filesystem::remove(path / "model-00002-of-00002.safetensors");
  SharedFolder::barrier();
  EXPECT_THROWS_WITH(load(state, path), "model-00002-of-00002.safetensors: No such file or directory");
}

} // namespace
} // namespace tessera::checkpoint::interop_test
