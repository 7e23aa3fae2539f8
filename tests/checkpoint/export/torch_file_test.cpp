// One file for torch.load in Python and torch::load in C++, and what exports do with names.
#include <gmock/gmock.h>
#include <tessera/checkpoint/checkpoint.h>
#include <tessera/checkpoint/hugging_face.h>
#include <tessera/checkpoint/torch_file.h>
#include <tessera/dtensor/api.h>
#include <tessera/fsdp/fully_shard.h>
#include <torch/torch.h>

#include <tessera/tests/checkpoint/shared_folder.h>
#include <tessera/tests/checkpoint/small_disk.h>
#include <tessera/tests/support/line_mesh.h>
#include <tessera/tests/support/matchers.h>
#include <tessera/tests/support/subprocess.h>
#include <tessera/tests/support/test_device.h>
#include <tessera/tests/support/world.h>

namespace tessera::checkpoint::torch_file_test {
namespace {

using ::testing::ElementsAre, ::testing::HasSubstr;
using testing::error_of;
using testing::last_rank;
using testing::line_mesh;
using testing::SharedFolder;
using testing::world_rank;
using testing::world_size;

struct Described {
  std::string name;
  const char* python_dtype;
  at::ScalarType dtype;
  std::vector<int64_t> sizes;
  Placements placements;
};

// Of every dtype, under every placement. Parts of Shard(1), and ragged ones, are many runs of the file.
std::vector<Described> described() {
  std::vector<int64_t> extents(static_cast<size_t>(world_size()), 63 / world_size());
  extents.back() += 63 % world_size();
  return {{"matrix", "float32", at::kFloat, {7, 9}, {Shard{0}}},
          {"layers.0.weight", "bfloat16", at::kBFloat16, {7, 9, 2}, {Shard{1}}},
          {"layers.0.bias", "float64", at::kDouble, {7, 9}, {RaggedShard{1, extents}}},
          {"layers.10.weight", "float16", at::kHalf, {300, 40}, {Shard{1}}},
          {"layers.class.in", "int64", at::kLong, {3, 5}, {Replicate{}}},
          {"whole.int32", "int32", at::kInt, {2, 2}, {}},
          {"whole.int16", "int16", at::kShort, {6}, {}},
          {"whole.int8", "int8", at::kChar, {1, 2}, {}},
          {"whole.uint8", "uint8", at::kByte, {3}, {}},
          {"whole.uint16", "uint16", at::kUInt16, {5}, {}},
          {"whole.uint32", "uint32", at::kUInt32, {5}, {}},
          {"whole.uint64", "uint64", at::kUInt64, {5}, {}},
          {"whole.float8", "float8_e4m3fn", at::kFloat8_e4m3fn, {5}, {}},
          {"mask", "bool", at::kBool, {4, 4}, {Shard{0}}},
          {"scalar", "float32", at::kFloat, {}, {Replicate{}}},
          {"empty", "float32", at::kFloat, {0, 3}, {Shard{0}}},
          {"complex", "complex64", at::kComplexFloat, {5, 3}, {Shard{1}}}};
}

at::Tensor expected(const Described& tensor) {
  auto numbers = torch::arange(c10::multiply_integers(tensor.sizes)).remainder(tensor.dtype == at::kBool ? 2 : 120);
  if (c10::isComplexType(tensor.dtype)) numbers = torch::complex(numbers.to(at::kFloat), -numbers.to(at::kFloat));
  return numbers.view(tensor.sizes).to(tensor.dtype);
}

StateDict filled() {
  const auto mesh = line_mesh();
  StateDict state;
  for (const auto& tensor : described()) {
    const auto full = expected(tensor);
    state.add(tensor.name, tensor.placements.empty() ? full : at::Tensor(distribute_tensor(full, mesh, tensor.placements)));
  }
  return state;
}

bool same_bytes(const at::Tensor& a, const at::Tensor& b) {
  return a.dtype() == b.dtype() && a.sizes() == b.sizes() &&
         std::memcmp(a.cpu().contiguous().const_data_ptr(), b.cpu().contiguous().const_data_ptr(), a.nbytes()) == 0;
}

// The archive in the file, by dotted names.
at::IValue read(const std::filesystem::path& file, const std::string& name) {
  torch::serialize::InputArchive archive;
  archive.load_from(file.string());
  size_t begin = 0;
  for (auto dot = name.find('.'); dot != std::string::npos; dot = name.find('.', begin)) {
    torch::serialize::InputArchive inner;
    archive.read(name.substr(begin, dot - begin), inner);
    archive = std::move(inner);
    begin = dot + 1;
  }
  at::IValue value;
  archive.read(name.substr(begin), value);
  return value;
}

void expect_in_cpp(const std::filesystem::path& file) {
  for (const auto& tensor : described())
    EXPECT_TRUE(same_bytes(read(file, tensor.name).toTensor(), expected(tensor))) << tensor.name;
}

// Each a file and its entries, for torch_file.py.
void expect_in_python(const std::vector<std::vector<std::string>>& files) {
#ifdef TESSERA_PYTHON
  SharedFolder::barrier();
  if (world_rank() == 0) {
    std::vector<std::string> arguments{TESSERA_PYTHON, TESSERA_TORCH_FILE_SCRIPT};
    for (const auto& file : files) {
      if (&file != &files.front()) arguments.emplace_back("--");
      arguments.insert(arguments.end(), file.begin(), file.end());
    }
    const auto result = testing::run_program(arguments, {}, std::chrono::seconds(200));
    EXPECT_EQ(result.status, 0) << result.output;
    if (result.status == 0) std::printf("%s", result.output.c_str());
  }
  SharedFolder::barrier();
#endif
}

bool is_of_layers(const std::string& name) { return name.starts_with("layers."); }
std::string as_peft(const std::string& name) { return "base_model.model." + name; }

// What is not of `described`, added to the state; as torch_file.py has it.
std::vector<std::string> add_others(StateDict& state) {
  const auto numbers = torch::arange(15).to(at::kFloat);
  state.add("columns", numbers.view({3, 5}).t().contiguous().t()); // another order of strides
  state.add("conjugate", torch::complex(numbers, numbers).conj());
  state.add("tied", numbers, {"also.tied"});
  state.set("step", 7);
  state.set("large", int64_t{1} << 40);
  state.set("negative", -300);
  state.set("rate", 0.1);
  state.set("done", true);
  state.set("name", "a \"b\"\n");
  state.set("counts", StateValue(std::vector<int64_t>{1, 2}));
  state.set("rates", StateValue(std::vector<double>{0.5}));
  state.set("names", StateValue(std::vector<std::string>{"x", "y"}));
  return {"columns:float32:3,5",
          "conjugate:complex64:15",
          "tied:float32:15",
          "also.tied:float32:15",
          "step=7",
          "large=1099511627776",
          "negative=-300",
          "rate=0.1",
          "done=True",
          R"(name='a "b"\n')",
          "counts=[1, 2]",
          "rates=[0.5]",
          "names=['x', 'y']"};
}

// Into tensors of other placements.
void expect_in_ours(const StateDict& state, const std::filesystem::path& file) {
  StateDict read;
  for (const auto& tensor : described()) read.add(tensor.name, torch::zeros(tensor.sizes, tensor.dtype));
  for (const auto* name : {"tied", "also.tied"}) read.add(name, torch::zeros({15}));
  read.add("columns", distribute_tensor(torch::zeros({3, 5}), line_mesh(), {Shard{1}}));
  read.add("conjugate", torch::zeros({15}, at::kComplexFloat));
  for (const auto& entry : state.entries()) {
    if (!entry.is_tensor()) read.set(entry.name, std::get<StateValue>(entry.content));
  }
  read.set("step", 0);
  read.set("names", StateValue(std::vector<std::string>{}));
  load(read, file);
  for (const auto& tensor : described()) EXPECT_TRUE(same_bytes(read.tensor(tensor.name), expected(tensor))) << tensor.name;
  EXPECT_TENSORS_EQUAL(DTensor(read.tensor("columns")).full_tensor(), torch::arange(15).to(at::kFloat).view({3, 5}));
  EXPECT_TENSORS_EQUAL(read.tensor("also.tied"), torch::arange(15).to(at::kFloat));
  EXPECT_EQ(read.value<int64_t>("step"), 7);
  EXPECT_EQ(read.value<std::vector<std::string>>("names"), (std::vector<std::string>{"x", "y"}));
}

TEST(TorchFile, EveryoneReadsTheSameBits) {
  const SharedFolder folder;
  const auto file = folder.path() / "runs" / "model.pt"; // in a folder that is not there yet
  auto state = filled();
  auto entries = add_others(state);
  for (const auto& tensor : described()) {
    entries.push_back(tensor.name + ":" + tensor.python_dtype + ":" + c10::Join(",", tensor.sizes));
  }
  entries.insert(entries.begin(), file.string());
  save_torch(state, file);
  expect_in_cpp(file);
  EXPECT_TRUE(same_bytes(read(file, "also.tied").toTensor(), torch::arange(15).to(at::kFloat)));
  EXPECT_EQ(read(file, "step").toInt(), 7);
  EXPECT_EQ(read(file, "name").toStringRef(), "a \"b\"\n");
  EXPECT_EQ(read(file, "counts").toIntVector(), (std::vector<int64_t>{1, 2}));
  EXPECT_EQ(read(file, "names").toListRef()[1].toStringRef(), "y");
  const auto none = folder.path() / "none.pt", layers = folder.path() / "layers.pt";
  save_torch(StateDict(), none);
  save_torch(filled(), layers, {.filter = is_of_layers, .rename = as_peft});
  expect_in_python(
      {entries,
       {none.string()},
       {layers.string(), "base_model.model.layers.0.weight:bfloat16:7,9,2", "base_model.model.layers.0.bias:float64:7,9",
        "base_model.model.layers.10.weight:float16:300,40", "base_model.model.layers.class.in:int64:3,5"}});
  torch::serialize::InputArchive archive;
  archive.load_from(none.string());
  EXPECT_TRUE(archive.keys().empty());
  expect_in_ours(state, file);
#ifdef TESSERA_PYTHON
  expect_in_ours(state, file.string() + ".python"); // what torch_file.py wrote of it with torch.save
#endif
  SharedFolder::barrier();
}

/// Some of its submodules have nothing to save.
struct NetImpl : torch::nn::Module {
  torch::nn::Sequential blocks{torch::nn::ReLU(), torch::nn::Linear(5, 7), torch::nn::BatchNorm1d(7), torch::nn::ReLU()};
  torch::nn::Linear head{torch::nn::LinearOptions(7, 3).bias(false)};
  torch::nn::ModuleList none;
  torch::nn::Dropout dropout;

  NetImpl() {
    register_module("blocks", blocks);
    register_module("head", head);
    register_module("none", none);
    register_module("dropout", dropout);
  }
};
TORCH_MODULE(Net);

template <typename Holder>
void expect_loaded(Holder model, Holder loaded, const std::filesystem::path& file) {
  std::vector<at::Tensor> values;
  for (const auto& tensor : model->parameters()) values.push_back(tensor.detach().clone());
  for (const auto& tensor : model->buffers()) values.push_back(tensor.detach().clone());
  fully_shard(*model, line_mesh());
  save_torch(state_dict(*model), file);
  torch::load(loaded, file.string());
  size_t i = 0;
  for (const auto& tensor : loaded->parameters()) {
    EXPECT_TRUE(same_bytes(tensor.detach(), values[i++]));
    EXPECT_TRUE(tensor.requires_grad());
  }
  for (const auto& tensor : loaded->buffers()) EXPECT_TRUE(same_bytes(tensor, values[i++]));
  EXPECT_EQ(i, values.size());
  SharedFolder::barrier();
}

TEST(TorchFile, AShardedModelIsLoadedIntoAnUnshardedOne) {
  const SharedFolder folder;
  torch::manual_seed(1);
  Net net, other_net;
  expect_loaded(net, other_net, folder.path() / "net.pt");
  const auto sequential = [] { return torch::nn::Sequential(torch::nn::Linear(5, 7), torch::nn::BatchNorm1d(7)); };
  expect_loaded(sequential(), sequential(), folder.path() / "sequential.pt"); // whose names begin with digits
}

struct OuterImpl : torch::nn::Module {
  OuterImpl() { register_module("net", net); }
  Net net;
};
TORCH_MODULE(Outer);

TEST(TorchFile, SubmodulesWithoutTensorsAreRenamedWithTheOthers) {
  const SharedFolder folder;
  torch::manual_seed(3);
  Outer outer;
  Net net;
  fully_shard(*outer, line_mesh());
  const auto state = state_dict(*outer, {.full_state_dict = true});
  const auto file = (folder.path() / "net.pt").string();
  save_torch(state_dict(*outer), file, {.rename = [](const std::string& name) { return name.substr(4); }}); // without "net."
  torch::load(net, file);
  EXPECT_TENSORS_EQUAL(net->head->weight.detach(), state.tensor("net.head.weight"));
  std::map<std::string, std::string> known;
  for (const auto& entry : state.entries()) known[entry.name] = entry.name + "_";
  save_torch(state_dict(*outer), file + ".known", {.rename = [&](const std::string& name) { return known.at(name); }});
  torch::serialize::InputArchive archive;
  archive.load_from(file + ".known");
  EXPECT_THAT(archive.keys(), ElementsAre("net"));
  SharedFolder::barrier();
}

TEST(TorchFile, LibTorchsOwnFilesAreReadToo) {
  const SharedFolder folder;
  torch::manual_seed(2);
  Net whole, sharded;
  const auto file = folder.path() / "net.pt";
  if (world_rank() == 0) torch::save(whole, file.string());
  SharedFolder::barrier();
  fully_shard(*sharded, line_mesh());
  load(state_dict(*sharded), file);
  const auto state = state_dict(*sharded, {.full_state_dict = true});
  for (const auto& tensor : whole->named_parameters()) EXPECT_TENSORS_EQUAL(state.tensor(tensor.key()), tensor.value().detach());
  SharedFolder::barrier();
}

TEST(TorchFile, AnExistingFileIsReplacedOnlyWhenAsked) {
  const SharedFolder folder;
  const auto file = folder.path() / "model.pt";
  save_torch(filled(), file);
  EXPECT_THROWS_WITH(save_torch(filled(), file), "model.pt exists already");
  save_torch(filled(), file, {.overwrite = true});
  expect_in_cpp(file);
  SharedFolder::barrier();
  if (world_rank() == 0) std::filesystem::create_directory(folder.path() / "folder");
  SharedFolder::barrier();
  EXPECT_THROWS_WITH(save_torch(filled(), folder.path() / "folder", {.overwrite = true}), "folder is not a file");
  EXPECT_THROWS_WITH(save_torch(filled(), file, {.overwrite = true, .differing_tensors = DifferingTensors::kEachRank}),
                     "holds a tensor once");
  SharedFolder::barrier();
}

int entries_of(const std::filesystem::path& folder) {
  return static_cast<int>(std::distance(std::filesystem::directory_iterator(folder), std::filesystem::directory_iterator()));
}

TEST(TorchFile, AWriteErrorOfOneRankIsAnErrorOnAllAndLeavesNothing) {
  const SharedFolder folder;
  StateDict state;
  state.add("large", distribute_tensor(torch::ones({world_size(), 500'000}), line_mesh(), {Shard{0}}));
  std::optional<testing::FileSizeLimit> limit;
  if (world_rank() == last_rank()) limit.emplace(1 << 20);
  const auto error = error_of([&] { save_torch(state, folder.path() / "model.pt"); });
  limit.reset();
  EXPECT_THAT(error, HasSubstr(c10::str("rank ", last_rank(), ": ")));
  EXPECT_THAT(error, HasSubstr("File too large"));
  if (world_size() > 1) EXPECT_THAT(error, HasSubstr("tensor \"large\": cannot write"));
  SharedFolder::barrier();
  EXPECT_EQ(entries_of(folder.path()), 0);
  SharedFolder::barrier();
}

TEST(TorchFile, AFullDiskIsAnErrorOnAllAndLeavesNothing) {
  const SharedFolder folder;
  const auto small = folder.path() / "disk";
  std::optional<testing::SmallDisk> disk;
  if (!testing::make_disk(disk, small, "size=6m", 0)) GTEST_SKIP() << "may not mount a file system";
  StateDict state;
  state.add("large", distribute_tensor(torch::ones({world_size(), 4'000'000}), line_mesh(), {Shard{0}}));
  EXPECT_THAT(error_of([&] { save_torch(state, small / "model.pt"); }), HasSubstr("No space left on device"));
  SharedFolder::barrier();
  if (world_rank() == 0) {
    EXPECT_EQ(entries_of(small), 0);
  }
  SharedFolder::barrier();
}

TEST(TorchFile, NamesThatAreNoModulesAreErrors) {
  const SharedFolder folder;
  const auto error_for = [&](const std::vector<std::string>& names) {
    StateDict state;
    for (const auto& name : names) state.add(name, torch::zeros({2}));
    return error_of([&] { save_torch(state, folder.path() / "model.pt"); });
  };
  EXPECT_THAT(error_for({"a", "a.b"}), HasSubstr("\"a\" is an entry and the begin of another one's name"));
  EXPECT_THAT(error_for({"a.b", "a"}), HasSubstr("\"a\" is an entry and the begin of another one's name"));
  EXPECT_THAT(error_for({".a"}), HasSubstr("\".a\" has an empty part"));
  EXPECT_THAT(error_for({"a."}), HasSubstr("\"a.\" has an empty part"));
  SharedFolder::barrier();
  EXPECT_EQ(entries_of(folder.path()), 0);
  SharedFolder::barrier();
}

TEST(Exports, RenameAndFilterChooseTheNames) {
  const SharedFolder folder;
  const auto adapters = folder.path() / "adapters";
  auto state = filled();
  state.set("step", 7); // a value, which the filter leaves out
  save_hugging_face(state, adapters, {.file_name = "adapter_model.safetensors", .filter = is_of_layers, .rename = as_peft});
  EXPECT_EQ(entries_of(adapters), 1);
  StateDict read;
  for (const auto& tensor : described()) {
    if (is_of_layers(tensor.name)) read.add(as_peft(tensor.name), torch::zeros(tensor.sizes, tensor.dtype));
  }
  load(read, adapters);
  for (const auto& tensor : described()) {
    if (is_of_layers(tensor.name)) EXPECT_TRUE(same_bytes(read.tensor(as_peft(tensor.name)), expected(tensor))) << tensor.name;
  }
  SharedFolder::barrier();
}

TEST(Exports, SeveralFilesOfAnotherNameAreReplacedTogether) {
  const SharedFolder folder;
  const auto path = folder.path() / "c";
  const HuggingFaceOptions options{.file_name = "adapter_model.safetensors", .max_file_bytes = 2000, .overwrite = true};
  const auto filter = [](const std::string& name) { return !name.starts_with("whole."); };
  for (int i = 0; i < 2; ++i) {
    auto each = options;
    each.filter = filter;
    save_hugging_face(filled(), path, each);
    EXPECT_TRUE(std::filesystem::exists(path / "adapter_model.safetensors.index.json"));
    EXPECT_TRUE(std::filesystem::exists(path / "adapter_model-00001-of-00003.safetensors"));
    SharedFolder::barrier();
  }
}

TEST(Exports, BadRenamesAreErrorsOnEveryRank) {
  const SharedFolder folder;
  StateDict state;
  for (const auto* name : {"a", "b", "c"}) state.add(name, torch::zeros({2}));
  const auto one = [](const std::string& name) { return name == "c" ? name : "same"; };
  const auto none = [](const std::string& name) { return name == "b" ? "" : name; };
  const auto by_rank = [](const std::string& name) { return world_rank() == last_rank() ? name + "x" : name; };
  const auto expect_errors = [&](const auto& save) {
    EXPECT_THAT(error_of([&] { save(one); }), HasSubstr("rename maps \"a\" and \"b\" to the same name \"same\""));
    EXPECT_THAT(error_of([&] { save(none); }), HasSubstr("rename gives \"b\" an empty name"));
    if (world_size() > 1)
      EXPECT_THAT(error_of([&] { save(by_rank); }), HasSubstr(c10::str("rank ", last_rank(), " has other options")));
  };
  expect_errors([&](const auto& rename) { save_torch(state, folder.path() / "model.pt", {.rename = rename}); });
  expect_errors([&](const auto& rename) { save_hugging_face(state, folder.path() / "c", {.rename = rename}); });
  for (const auto* name : {"", "a.pt", "x/model.safetensors", ".safetensors", "..safetensors", "a\nb.safetensors",
                           "\x7f.safetensors", "../a.safetensors", "/a.safetensors", "a\t.safetensors"}) {
    EXPECT_THAT(error_of([&] { save_hugging_face(state, folder.path() / "c", {.file_name = name}); }),
                HasSubstr("which is no name of a safetensors file"));
  }
  EXPECT_THAT(error_of([&] { save_hugging_face(state, folder.path() / "c", {.file_name = "\xff.safetensors"}); }),
              HasSubstr("HuggingFaceOptions::file_name"));
  for (const auto& target : {folder.path() / "d" / "", folder.path() / "e" / "."}) {
    EXPECT_THAT(error_of([&] { save_torch(state, target); }), HasSubstr("is the name of a folder, not of a file"));
  }
  SharedFolder::barrier();
  EXPECT_EQ(entries_of(folder.path()), 0);
  SharedFolder::barrier();
}

// The first ranks export what they hold whole between them, while the others go on.
TEST(Exports, ByTheRanksOfAMesh) {
  const SharedFolder folder;
  std::vector<int64_t> ranks(static_cast<size_t>((world_size() + 1) / 2));
  std::iota(ranks.begin(), ranks.end(), 0);
  const auto mesh = make_device_mesh(testing::test_device_type(), {static_cast<int64_t>(ranks.size())}, ranks);
  const auto values = torch::arange(30.f).view({10, 3});
  if (mesh.coordinate()) {
    StateDict state;
    state.add("w", distribute_tensor(values, mesh, {Shard{0}}));
    save_torch(state, folder.path() / "model.pt", {.mesh = mesh});
    save_hugging_face(state, folder.path() / "c", {.max_file_bytes = 50, .mesh = mesh});
  } else {
    EXPECT_THAT(error_of([&] { save_torch({}, folder.path() / "model.pt", {.mesh = mesh}); }), HasSubstr("is not in DeviceMesh"));
    EXPECT_THAT(error_of([&] { save_hugging_face({}, folder.path() / "c", {.mesh = mesh}); }), HasSubstr("is not in DeviceMesh"));
  }
  SharedFolder::barrier();
  for (const auto* name : {"model.pt", "c"}) {
    StateDict read;
    read.add("w", torch::zeros({10, 3}));
    load(read, folder.path() / name);
    EXPECT_TENSORS_EQUAL(read.tensor("w"), values);
  }
}

} // namespace
} // namespace tessera::checkpoint::torch_file_test
