// Checkpoints of unsharded state, by one process without a process group.
#include <gmock/gmock.h>
#include <tessera/checkpoint/checkpoint.h>
#include <tessera/checkpoint/formats/index.h>
#include <tessera/checkpoint/formats/reader.h>
#include <torch/torch.h>

#include <map>

#include <tessera/tests/checkpoint/folder_entries.h>
#include <tessera/tests/support/matchers.h>
#include <tessera/tests/support/temporary_folder.h>

namespace tessera::checkpoint::plain_test {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using testing::error_of;
using ::testing::HasSubstr;
using testing::names_in;
using testing::read_text;
using testing::TemporaryFolder;
using ::testing::UnorderedElementsAre;
using testing::write_text;

const char* kFile = "shard-00001-model-00001-of-00001.safetensors";

// A tensor of every dtype, 0-dim and empty ones, one longer than a block, one that is not contiguous; values of every type.
StateDict example(int64_t seed) {
  torch::manual_seed(seed);
  StateDict state;
  for (const auto dtype : {at::kBool, at::kByte, at::kChar, at::kShort, at::kInt, at::kLong}) {
    state.add(std::string("integer.") + c10::toString(dtype), torch::randint(0, 2, {3, 5}).to(dtype));
  }
  for (const auto dtype : {at::kHalf, at::kBFloat16, at::kFloat, at::kDouble, at::kFloat8_e4m3fn, at::kComplexFloat}) {
    state.add(std::string("float.") + c10::toString(dtype), torch::randn({2, 3}).to(dtype));
  }
  state.add("scalar", torch::randn({}));
  state.add("empty", torch::randn({0, 3}));
  state.add("long", torch::randn({300, 1025}));
  state.add("transposed", torch::randn({4, 6}).t());
  state.set("step", seed);
  state.set("lr", 0.1 * static_cast<double>(seed));
  state.set("infinite", seed == 1 ? std::numeric_limits<double>::infinity() : 0.0);
  state.set("text", seed == 1 ? "line\n\"ü\"" : "");
  state.set("done", seed == 1);
  state.set("position", StateValue(std::vector<int64_t>{seed, -1}));
  state.set("weights", StateValue(std::vector<double>{1e-300, static_cast<double>(seed)}));
  state.set("words", StateValue(std::vector<std::string>{"a", std::to_string(seed)}));
  return state;
}

void write_text_in_new_folder(const std::filesystem::path& folder) {
  std::filesystem::create_directory(folder);
  write_text(folder / "text", "of others");
}

bool same_bytes(const at::Tensor& a, const at::Tensor& b) {
  const auto x = a.contiguous(), y = b.contiguous();
  if (a.scalar_type() != b.scalar_type() || a.sizes() != b.sizes()) return false;
  return x.numel() == 0 || std::memcmp(x.data_ptr(), y.data_ptr(), x.nbytes()) == 0;
}

void expect_same_bytes(const StateDict& a, const StateDict& b) {
  ASSERT_EQ(a.size(), b.size());
  for (const auto& entry : a.entries()) {
    if (entry.is_tensor()) {
      EXPECT_TRUE(same_bytes(a.tensor(entry.name), b.tensor(entry.name))) << entry.name;
    } else {
      EXPECT_EQ(a.value(entry.name), b.value(entry.name)) << entry.name;
    }
  }
}

TEST(PlainCheckpoint, EverythingComesBack) {
  const TemporaryFolder folder;
  const auto saved = example(1);
  save(saved, folder.path() / "new" / "step-1");
  EXPECT_THAT(names_in(folder.path() / "new"), UnorderedElementsAre("step-1", "latest"));
  EXPECT_THAT(names_in(folder.path() / "new" / "step-1"), UnorderedElementsAre("index.json", kFile));
  for (const bool verify : {true, false}) {
    auto loaded = example(2);
    LoadOptions options;
    options.verify = verify;
    const auto report = load(loaded, folder.path() / "new" / "step-1", options);
    EXPECT_TRUE(report.missing.empty() && report.unused.empty());
    expect_same_bytes(saved, loaded);
  }
}

TEST(PlainCheckpoint, AnEmptyStateIsACheckpoint) {
  const TemporaryFolder folder;
  save({}, folder.path() / "c");
  EXPECT_THAT(names_in(folder.path() / "c"), ElementsAre("index.json"));
  EXPECT_NO_THROW(load(StateDict(), folder.path() / "c"));
}

TEST(PlainCheckpoint, LoadingKeepsThePlaceAndTellsAutograd) {
  const TemporaryFolder folder;
  torch::nn::Linear a(3, 2), b(3, 2);
  save(state_dict(*a), folder.path() / "c");
  const auto weight = b->weight;
  const auto version = weight._version();
  load(state_dict(*b), folder.path() / "c");
  EXPECT_TRUE(weight.is_same(b->weight));
  EXPECT_TRUE(weight.requires_grad());
  EXPECT_GT(weight._version(), version);
  EXPECT_TRUE(torch::equal(a->weight, weight));
}

TEST(PlainCheckpoint, ReferencesToEntriesOutliveALoadWithoutBindings) {
  const TemporaryFolder folder;
  save(example(1), folder.path() / "c");
  auto state = example(2);
  const auto* const entries = state.entries().data();
  load(state, folder.path() / "c");
  EXPECT_EQ(state.entries().data(), entries);
  load_state_dict(state, example(3));
  EXPECT_EQ(state.entries().data(), entries);
  expect_same_bytes(state, example(3));
}

TEST(PlainCheckpoint, AnExistingTargetIsNeverChanged) {
  const TemporaryFolder folder;
  const auto path = folder.path() / "c";
  save(example(1), path);
  const auto index = read_text(path / "index.json");
  EXPECT_THAT(error_of([&] { save(example(2), path); }), HasSubstr("c exists already"));
  EXPECT_THAT(error_of([&] { save(example(2), path.string() + "/"); }), HasSubstr("c exists already"));
  EXPECT_EQ(read_text(path / "index.json"), index);
  SaveOptions overwrite;
  overwrite.overwrite = true;
  save(example(2), path, overwrite);
  auto loaded = example(3);
  load(loaded, path);
  expect_same_bytes(example(2), loaded);
  EXPECT_THAT(names_in(folder.path()), UnorderedElementsAre("c", "latest"));
}

TEST(PlainCheckpoint, OnlyACheckpointIsReplaced) {
  const TemporaryFolder folder;
  const SaveOptions overwrite{.overwrite = true};
  const auto error = [&](const std::string& name) {
    return error_of([&] { save(example(1), folder.path() / name, overwrite); });
  };
  write_text(folder.path() / "file", "text");
  EXPECT_THAT(error("file"), HasSubstr("file is not a checkpoint, so it is not replaced"));
  save(example(1), folder.path() / "runs" / "c");
  EXPECT_THAT(error("runs"),
              ::testing::ContainsRegex("runs holds (c|latest), which is no part of a checkpoint, so it is not replaced"));
  std::filesystem::create_directory(folder.path() / "empty");
  EXPECT_EQ(error("empty"), "no error");
  EXPECT_THAT(names_in(folder.path()), UnorderedElementsAre("file", "runs", "empty", "latest"));
}

TEST(PlainCheckpoint, ALoadWithAFilterTakesAPart) {
  const TemporaryFolder folder;
  const auto path = folder.path() / "c";
  torch::nn::Linear model(2, 2);
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  model->forward(torch::ones({1, 2})).sum().backward();
  optimizer.step();
  auto saved = state_dict(*model, optimizer);
  saved.add("spare", torch::ones({2}));
  saved.set("step", 3);
  save(saved, path);

  torch::nn::Linear other(2, 2);
  torch::optim::SGD fresh(other->parameters(), torch::optim::SGDOptions(0.5).momentum(0.9));
  const auto bias = other->bias.detach().clone();
  auto state = state_dict(*other, fresh);
  state.add("lost", torch::full({2}, 5.0));
  state.set("epoch", 1);
  const auto report = load(state, path, {.filter = [](const std::string& name) { return name == "weight"; }});
  EXPECT_TENSORS_EQUAL(other->weight, model->weight);
  EXPECT_TENSORS_EQUAL(other->bias, bias);
  EXPECT_TRUE(fresh.state().empty());
  EXPECT_EQ(fresh.param_groups()[0].options().get_lr(), 0.5);
  EXPECT_EQ(report.missing.size() + report.unused.size(), 0);
  // What it accepts is still asked for on both sides.
  EXPECT_THAT(error_of([&] { load(state, path, {.filter = [](const auto& name) { return !name.starts_with("optimizer."); }}); }),
              AllOf(HasSubstr("not in the checkpoint:\n  lost\n  epoch"), HasSubstr("not asked for:\n  spare\n  step")));
  const auto only = [](const std::string& prefix) { return [prefix](const auto& name) { return name.starts_with(prefix); }; };
  EXPECT_THAT(error_of([&] { load(state, path, {.filter = only("optimizer.state.bias.")}); }),
              HasSubstr("of the names that begin with \"optimizer.\" it must accept all or none"));
  load(state, path, {.filter = only("optimizer.")});
  EXPECT_EQ(fresh.param_groups()[0].options().get_lr(), 0.1);
  EXPECT_EQ(fresh.state().size(), 2);
  EXPECT_TENSORS_EQUAL(other->bias, bias);
}

// `rename` comes after it.
TEST(PlainCheckpoint, AFilterSeesTheNamesOfTheState) {
  const TemporaryFolder folder;
  torch::nn::Linear swapped(2, 2);
  const auto swap = [](const std::string& name) { return name == "weight" ? std::string("other") : name; };
  StateDict renamed;
  renamed.add("other", torch::ones({2, 2}));
  renamed.add("bias", torch::ones({2}));
  save(renamed, folder.path() / "r");
  auto target = state_dict(*swapped);
  load(target, folder.path() / "r", {.filter = [](const auto& name) { return name == "bias"; }, .rename = swap});
  EXPECT_TENSORS_EQUAL(swapped->bias, torch::ones({2}));
}

TEST(PlainCheckpoint, ARenameNeedNotKnowWhatTheFilterRefuses) {
  const TemporaryFolder folder;
  const std::map<std::string, std::string> names{{"weight", "other"}};
  const auto rename = [&](const std::string& name) { return names.at(name); };
  const auto is_weight = [](const std::string& name) { return name == "weight"; };
  StateDict saved;
  saved.add("other", torch::ones({2, 2}));
  saved.add("model.other", torch::full({2, 2}, 2.0));
  save(saved, folder.path() / "c");
  const LoadOptions options{.filter = is_weight, .rename = rename};
  torch::nn::Linear model(2, 2);
  const auto bias = model->bias.detach().clone();
  load(state_dict(*model), folder.path() / "c", options);
  EXPECT_TENSORS_EQUAL(model->weight, torch::ones({2, 2}));
  EXPECT_TENSORS_EQUAL(model->bias, bias);
  StateDict tied;
  tied.add("alias", torch::zeros({2, 2}), {"weight"});
  load(tied, folder.path() / "c", options);
  EXPECT_TENSORS_EQUAL(tied.tensor("weight"), torch::ones({2, 2}));
  auto of_python = options;
  of_python.allow_unused = true;
  of_python.python = PythonKeys{};
  StateDict only;
  only.add("model.other", torch::full({2, 2}, 2.0));
  save(only, folder.path() / "python");
  load(state_dict(*model), folder.path() / "python", of_python);
  EXPECT_TENSORS_EQUAL(model->weight, torch::full({2, 2}, 2.0));
  EXPECT_NE(error_of([&] { load(state_dict(*model), folder.path() / "c", {.rename = rename}); }), "no error");
}

TEST(PlainCheckpoint, ErrorsOfALoadSayWhatWouldHelp) {
  const TemporaryFolder folder;
  StateDict saved;
  saved.add("model.w", torch::ones({2}));
  save(saved, folder.path() / "c");
  StateDict state;
  state.add("w", torch::ones({2}));
  const auto wrong = [](const std::string& name) { return "net." + name; };
  const auto error = error_of([&] { load(state, folder.path() / "c", {.rename = wrong}); });
  EXPECT_THAT(error, HasSubstr("not in the checkpoint:\n  w, looked for as \"net.w\"\n"));
  EXPECT_THAT(error, HasSubstr("in the checkpoint, and not asked for:\n  model.w\n"));
  EXPECT_THAT(error, HasSubstr("LoadOptions::allow_missing"));
  StateDict wide;
  wide.add("model.w", torch::ones({2}, at::kDouble));
  EXPECT_THAT(error_of([&] { load(wide, folder.path() / "c"); }), HasSubstr("\nLoadOptions::cast converts between dtypes"));
  StateDict longer;
  longer.add("model.w", torch::ones({3}, at::kDouble));
  EXPECT_THAT(error_of([&] { load(longer, folder.path() / "c", {.cast = true}); }), ::testing::Not(HasSubstr("::cast")));
}

TEST(PlainCheckpoint, ACheckpointHasAVisibleNameOfItsOwn) {
  const TemporaryFolder folder;
  for (const auto* name : {"latest", "latest/", "x/../latest", "./latest/."}) {
    EXPECT_THAT(error_of([&] { save({}, folder.path() / name); }), HasSubstr("the name \"latest\" is kept for the link"));
  }
  EXPECT_THAT(error_of([&] { save({}, folder.path() / ".c"); }), HasSubstr(".c: names that begin with '.' are kept"));
  EXPECT_THAT(names_in(folder.path()), ElementsAre());
}

TEST(PlainCheckpoint, AFailedSaveLeavesNothing) {
  const TemporaryFolder folder;
  StateDict meta, complex;
  meta.add("m", torch::empty({2}, at::kMeta));
  EXPECT_THAT(error_of([&] { save(meta, folder.path() / "c"); }),
              HasSubstr("rank 0: checkpoint: tensor \"m\": a meta tensor has no data"));
  complex.add("z", torch::zeros({2}, at::kComplexDouble));
  EXPECT_THAT(error_of([&] { save(complex, folder.path() / "c"); }),
              HasSubstr("tensor \"z\": the safetensors format has no dtype ComplexDouble"));
  StateDict binary;
  binary.set("bytes", "\xff");
  EXPECT_THAT(error_of([&] { save(binary, folder.path() / "c"); }),
              HasSubstr("checkpoint: value \"bytes\": cannot be written as JSON"));
  StateDict named;
  named.set("optimizer.param_groups.0.params", "bad\xff");
  named.add("bad\xff", torch::zeros({2}));
  EXPECT_THAT(error_of([&] { save(named, folder.path() / "c"); }),
              HasSubstr(R"(checkpoint: the name "bad\xff" of a tensor: cannot be written as JSON)"));
  write_text(folder.path() / "file", "");
  EXPECT_THAT(error_of([&] { save(example(1), folder.path() / "file" / "c"); }), HasSubstr("file"));
  EXPECT_THAT(names_in(folder.path()), ElementsAre("file"));
}

TEST(PlainCheckpoint, WhatAKilledSaveLeftIsRemovedByTheNext) {
  const TemporaryFolder folder;
  const auto left = folder.path() / ".c.saving-1-0", others = folder.path() / ".d.saving-1-0";
  std::filesystem::create_directory(left);
  std::filesystem::create_directory(others);
  write_text(left / kFile, "torn");
  const std::vector<std::string> not_ours{".c.saving-notes", ".c.saving-1-x", ".c.saving-1", ".my.removing-list",
                                          "c.removing-1-1"};
  for (const auto& name : not_ours) write_text_in_new_folder(folder.path() / name);
  save(example(1), folder.path() / "c");
  auto expected = not_ours;
  expected.insert(expected.end(), {"c", ".d.saving-1-0", "latest"});
  EXPECT_THAT(names_in(folder.path()), ::testing::UnorderedElementsAreArray(expected));
}

TEST(PlainCheckpoint, DifferencesAreListedBeforeAnythingIsWritten) {
  const TemporaryFolder folder;
  StateDict saved;
  saved.add("same", torch::ones({2}));
  saved.add("shape", torch::ones({2, 3}));
  saved.add("dtype", torch::ones({2}));
  saved.add("extra", torch::ones({2}));
  saved.set("number", 1);
  saved.set("spare", 1);
  save(saved, folder.path() / "c");
  StateDict state;
  state.add("same", torch::zeros({2}));
  state.add("shape", torch::zeros({3, 2}));
  state.add("dtype", torch::zeros({2}, at::kDouble));
  state.add("lost", torch::zeros({2}));
  state.set("number", 1.5);
  const auto error = error_of([&] { load(state, folder.path() / "c"); });
  EXPECT_THAT(error, HasSubstr("not in the checkpoint:\n  lost\ndifferent in the checkpoint:\n"));
  EXPECT_THAT(error, HasSubstr("shape: saved as Float[2, 3], to be loaded into Float[3, 2]"));
  EXPECT_THAT(error, HasSubstr("dtype: saved as Float[2], to be loaded into Double[2]"));
  EXPECT_THAT(error, HasSubstr("number: saved as {\"i64\":1}, a value of another type than {\"f64\":1.5}"));
  for (const auto* name : {"shape", "dtype", "number"}) state.erase(name);
  LoadOptions options;
  options.allow_missing = true;
  EXPECT_THAT(error_of([&] { load(state, folder.path() / "c", options); }),
              HasSubstr("the checkpoint holds more than the state (LoadOptions::allow_unused ignores it):\n  dtype\n  extra\n  "
                        "number\n  shape\n  spare"));
  EXPECT_TRUE(torch::equal(state.tensor("same"), torch::zeros({2})));
  options.allow_unused = true;
  const auto report = load(state, folder.path() / "c", options);
  EXPECT_THAT(report.missing, ElementsAre("lost"));
  EXPECT_THAT(report.unused, ElementsAre("dtype", "extra", "number", "shape", "spare"));
  EXPECT_TRUE(torch::equal(state.tensor("same"), torch::ones({2})));
}

TEST(PlainCheckpoint, TiedTensorsLoadEitherWay) {
  const TemporaryFolder folder;
  StateDict tied, apart, unequal;
  tied.add("a", torch::ones({3}), {"b"});
  apart.add("a", torch::zeros({3}));
  apart.add("b", torch::zeros({3}));
  save(tied, folder.path() / "tied");
  load(apart, folder.path() / "tied");
  EXPECT_TRUE(torch::equal(apart.tensor("b"), torch::ones({3})));
  StateDict other_way;
  other_way.add("b", torch::zeros({3}), {"a"});
  load(other_way, folder.path() / "tied");
  EXPECT_TRUE(torch::equal(other_way.tensor("a"), torch::ones({3})));

  save(apart, folder.path() / "apart");
  tied.tensor("a").zero_();
  load(tied, folder.path() / "apart");
  EXPECT_TRUE(torch::equal(tied.tensor("a"), torch::ones({3})));

  for (const auto* name : {"a", "b"}) apart.tensor(name)[1] = std::numeric_limits<double>::quiet_NaN();
  save(apart, folder.path() / "nan");
  load(tied, folder.path() / "nan");
  EXPECT_TRUE(same_bytes(tied.tensor("a"), apart.tensor("a")));

  apart.tensor("b").fill_(2);
  save(apart, folder.path() / "unequal");
  EXPECT_THAT(
      error_of([&] { load(tied, folder.path() / "unequal"); }),
      HasSubstr("\"a\" is tied to \"b\", but the checkpoint holds different values for \"a\" and \"b\"; LoadOptions::filter"));
}

// As in the folders of others that hold the embedding and the head apart.
TEST(PlainCheckpoint, AFilterChoosesAmongTheNamesOfATiedTensor) {
  const TemporaryFolder folder;
  StateDict tied, apart, first;
  tied.add("a", torch::zeros({3}), {"b"});
  apart.add("a", torch::ones({3}));
  apart.add("b", torch::full({3}, 2.0));
  first.add("a", torch::ones({3}));
  save(apart, folder.path() / "apart");
  save(first, folder.path() / "first");
  const auto only = [](const std::string& name) -> LoadOptions {
    return {.filter = [name](const std::string& each) { return each == name; }};
  };
  for (const auto* name : {"a", "b"}) {
    load(tied, folder.path() / "apart", only(name));
    EXPECT_TRUE(torch::equal(tied.tensor("a"), apart.tensor(name))) << name;
  }
  EXPECT_THAT(error_of([&] { load(tied, folder.path() / "first", only("b")); }), HasSubstr("not in the checkpoint:\n  b\n"));
}

TEST(PlainCheckpoint, TornOnesAreErrorsThatNameTheFile) {
  const TemporaryFolder folder;
  const auto path = folder.path() / "c";
  save(example(1), path);
  const auto whole = read_text(path / kFile), index = read_text(path / "index.json");
  const auto error = [&] {
    auto state = example(2);
    return error_of([&] { load(state, path); });
  };
  write_text(path / kFile, whole.substr(0, whole.size() - 1));
  EXPECT_THAT(error(), HasSubstr(std::string(kFile) + " has " + std::to_string(whole.size() - 1) +
                                 " bytes where the checkpoint wrote " + std::to_string(whole.size())));
  std::filesystem::remove(path / kFile);
  EXPECT_THAT(error(), HasSubstr(std::string(kFile) + ": No such file or directory"));
  write_text(path / kFile, whole);
  EXPECT_EQ(error(), "no error");
  write_text(path / "index.json", index.substr(0, index.size() / 2));
  EXPECT_THAT(error(), HasSubstr("index.json: damaged"));
  std::filesystem::remove(path / "index.json");
  EXPECT_THAT(error(), HasSubstr("c is not a complete checkpoint: it has no index.json"));
  EXPECT_THAT(error_of([&] { load(StateDict(), folder.path() / "none"); }),
              HasSubstr("none is not a checkpoint: no such folder"));
}

TEST(PlainCheckpoint, AFlippedByteIsFoundAndNamed) {
  const TemporaryFolder folder;
  const auto path = folder.path() / "c";
  StateDict saved;
  saved.add("first", torch::randn({700, 1000}));
  saved.add("second", torch::randn({5}));
  save(saved, path);
  const auto whole = read_text(path / kFile);
  const auto index = internal::read_index(path);
  const auto data = static_cast<size_t>(index.files[0].data_begin);
  const auto error_at = [&](size_t byte) {
    auto damaged = whole;
    damaged[byte] = static_cast<char>(damaged[byte] ^ 4);
    write_text(path / kFile, damaged);
    return error_of([&] { load(saved, path); });
  };
  EXPECT_TRUE(verify(path).empty());
  EXPECT_THAT(error_at(0), HasSubstr(std::string(kFile) + " is damaged: its header"));
  EXPECT_THAT(error_at(data - 1), HasSubstr("its header"));
  EXPECT_THAT(error_at(data),
              HasSubstr("tensor \"first\", bytes " + std::to_string(data) + " to " + std::to_string(data + (1 << 20))));
  EXPECT_THAT(error_at(data + 2'799'999), HasSubstr("tensor \"first\", bytes " + std::to_string(data + (2 << 20)) + " to " +
                                                    std::to_string(data + 2'800'000)));
  EXPECT_THAT(error_at(whole.size() - 1), HasSubstr("tensor \"second\""));
}

TEST(PlainCheckpoint, ReadsOnlyTheBlocksItNeeds) {
  const TemporaryFolder folder;
  StateDict saved;
  saved.add("t", torch::arange(4 << 20).view({4096, 1024}).to(at::kInt)); // 16 blocks
  save(saved, folder.path() / "c");
  const auto index = internal::read_index(folder.path() / "c");
  const auto read = [&](const internal::Box& box) {
    internal::Reader reader(folder.path() / "c", index, true);
    const internal::Piece piece{box, torch::zeros(box.sizes, at::kInt)};
    reader.read(index.tensors[0], piece);
    EXPECT_TRUE(torch::equal(piece.data,
                             saved.tensor("t").narrow(0, box.offsets[0], box.sizes[0]).narrow(1, box.offsets[1], box.sizes[1])));
    return reader.bytes_read();
  };
  EXPECT_EQ(read({{0, 0}, {1, 1024}}), 1 << 20);
  EXPECT_EQ(read({{255, 0}, {2, 1024}}), 2 << 20);
  EXPECT_EQ(read({{256, 0}, {512, 1024}}), 2 << 20);
  EXPECT_EQ(read({{100, 7}, {300, 3}}), 2 << 20);
  EXPECT_EQ(read(internal::whole({4096, 1024})), 16 << 20);
}

TEST(Index, ALargeFileOfOthersIsNotRead) {
  const TemporaryFolder folder;
  const auto path = folder.path() / "index.json";
  write_text(path, "{}");
  std::filesystem::resize_file(path, uintmax_t{4} << 30); // sparse
  EXPECT_THAT(error_of([&] { internal::read_index(folder.path()); }), HasSubstr("index.json: not the index of a checkpoint"));
  write_text(path, internal::kIndexStart);
  std::filesystem::resize_file(path, uintmax_t{4} << 30);
  EXPECT_THAT(error_of([&] { internal::read_index(folder.path()); }),
              HasSubstr("index.json has 4294967296 bytes, more than the 536870912 it may have"));
}

TEST(Verify, ListsEverythingThatIsWrong) {
  const TemporaryFolder folder;
  const auto path = folder.path() / "c";
  StateDict state;
  for (const auto* name : {"one", "two", "three"}) state.add(name, torch::ones({3}));
  save(state, path);
  EXPECT_TRUE(verify(path).empty());
  auto bytes = read_text(path / kFile);
  bytes[bytes.size() - 1] ^= 1;  // three
  bytes[bytes.size() - 36] ^= 1; // one
  write_text(path / kFile, bytes);
  const auto findings = verify(path);
  ASSERT_EQ(findings.size(), 2);
  EXPECT_THAT(findings[0], HasSubstr("tensor \"one\""));
  EXPECT_THAT(findings[1], HasSubstr("tensor \"three\""));
  std::filesystem::remove(path / kFile);
  EXPECT_THAT(verify(path), ElementsAre(HasSubstr("No such file")));
  EXPECT_THAT(verify(folder.path() / "none"), ElementsAre(HasSubstr("no such folder")));
  std::filesystem::create_symlink("circle", folder.path() / "circle");
  EXPECT_THAT(verify(folder.path() / "circle"), ElementsAre(HasSubstr("Too many levels of symbolic links")));
}

} // namespace
} // namespace tessera::checkpoint::plain_test
