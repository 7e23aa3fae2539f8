#include <gmock/gmock.h>
#include <tessera/checkpoint/checkpoint.h>
#include <tessera/checkpoint/formats/index.h>
#include <torch/torch.h>

#include "../checkpoint/torch_archives.h"
#include "../support/subprocess.h"
#include "../support/temporary_folder.h"

namespace tessera::tessera_checkpoint_test {
namespace {

using ::testing::HasSubstr;
using testing::TemporaryFolder;

testing::ProgramResult run(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), TESSERA_CHECKPOINT_TOOL);
  return testing::run_program(arguments, {}, std::chrono::seconds(60), testing::Start::kForked);
}

StateDict example() {
  at::manual_seed(1);
  StateDict state;
  state.add("layer.weight", torch::randn({30, 20}), {"head.weight"});
  state.add("layer.bias", torch::randn({20}).to(at::kBFloat16));
  state.add("optimizer.state.layer.bias.exp_avg", torch::randn({20}));
  state.add("count", torch::arange(3));
  state.set("step", 12);
  state.set("name", "run");
  return state;
}

TEST(CheckpointTool, InspectShowsTensorsAndValues) {
  const TemporaryFolder folder;
  checkpoint::save(example(), folder.path() / "c");
  const auto result = run({"inspect", folder.path() / "c"});
  EXPECT_EQ(result.status, 0);
  EXPECT_THAT(result.output, HasSubstr("4 tensors, 2.5 KiB; 2 values; 1 files"));
  EXPECT_THAT(result.output, ::testing::ContainsRegex("layer.weight = head.weight +F32 +\\[30, 20\\] +plain +1 +2.3 KiB\n"));
  EXPECT_THAT(result.output, ::testing::ContainsRegex("layer.bias +BF16 +\\[20\\] +plain +1 +40 B\n"));
  EXPECT_THAT(result.output, ::testing::ContainsRegex("step +i64 +12\n"));
  EXPECT_THAT(result.output, ::testing::ContainsRegex("name +string +\"run\"\n"));
}

TEST(CheckpointTool, InspectShowsControlCharactersAsText) {
  const TemporaryFolder folder;
  StateDict state;
  state.add("a\nb\x1b[2J", torch::zeros({1}));
  checkpoint::save(state, folder.path() / "c");
  EXPECT_THAT(run({"inspect", folder.path() / "c"}).output, HasSubstr("a\\nb\\x1b[2J "));
}

TEST(CheckpointTool, NoOutputHoldsControlCharacters) {
  const TemporaryFolder folder;
  StateDict state, other;
  state.add("a\n\x1b[2J", torch::zeros({1}));
  other.add("b\x7f", torch::zeros({1}));
  checkpoint::save(state, folder.path() / "c");
  checkpoint::save(other, folder.path() / "d");
  EXPECT_EQ(run({"diff", folder.path() / "c", folder.path() / "d"}).output,
            "a\\n\\x1b[2J: only in the first\nb\\x7f: only in the second\n");
  auto index = internal::read_index(folder.path() / "c");
  index.tensors[0].layout = "l\x1b[2J";
  testing::write_text(folder.path() / "c" / internal::kIndexName, internal::encode_index(index));
  EXPECT_THAT(run({"inspect", folder.path() / "c"}).output, HasSubstr(" l\\x1b[2J "));
  testing::write_text(folder.path() / "c" / index.files[0].name, "");
  for (const auto& arguments : std::vector<std::vector<std::string>>{{"verify", folder.path() / "c"},
                                                                     {"convert", folder.path() / "c", folder.path() / "e"}}) {
    const auto result = run(arguments);
    EXPECT_NE(result.status, 0);
    EXPECT_THAT(result.output, ::testing::Not(HasSubstr("\x1b")));
  }
  checkpoint::save(other, folder.path() / "f\x1b");
  EXPECT_THAT(run({"convert", folder.path() / "f\x1b", folder.path() / "g\x1b"}).output, ::testing::EndsWith("g\\x1b\n"));
  EXPECT_THAT(run({"inspect", folder.path() / "f\x1b"}).output, HasSubstr("f\\x1b\n"));
}

// As Python writes a lone surrogate.
TEST(CheckpointTool, TextThatIsNotUtf8IsShownAndCompared) {
  const TemporaryFolder folder;
  const auto write = [&](const char* name, const std::string& text) {
    const auto pickle = testing::pickle_of([&](internal::PickleWriter& out) {
      out.empty_dict();
      out.open();
      out.text("text");
      out.text(text);
      out.close_dict();
    });
    testing::write_archive(folder.path() / name, pickle, "");
    return (folder.path() / name).string();
  };
  const auto a = write("a.pt", "\xed\xa0\x80"), b = write("b.pt", "\xed\xa0\x81");
  const auto inspected = run({"inspect", a});
  EXPECT_EQ(inspected.status, 0) << inspected.output;
  EXPECT_THAT(inspected.output, ::testing::ContainsRegex("text +string +\"\xef\xbf\xbd"));
  EXPECT_EQ(run({"diff", a, a}).output, "the same\n");
  const auto differing = run({"diff", a, b});
  EXPECT_EQ(differing.status, 1);
  EXPECT_THAT(differing.output, ::testing::StartsWith("text: {\"string\":\""));
}

TEST(CheckpointTool, VerifyFindsDamage) {
  const TemporaryFolder folder;
  checkpoint::save(example(), folder.path() / "c");
  EXPECT_EQ(run({"verify", folder.path() / "c"}).status, 0);
  const auto file = folder.path() / "c" / "shard-00001-model-00001-of-00001.safetensors";
  auto bytes = testing::read_text(file);
  bytes.back() = static_cast<char>(bytes.back() ^ 1);
  testing::write_text(file, bytes);
  const auto result = run({"verify", folder.path() / "c"});
  EXPECT_EQ(result.status, 1);
  EXPECT_THAT(result.output, HasSubstr("is damaged: tensor \"layer.bias\""));
  EXPECT_EQ(run({"verify", folder.path() / "none"}).status, 1);
}

TEST(CheckpointTool, DiffListsWhatDiffers) {
  const TemporaryFolder folder;
  auto state = example();
  checkpoint::save(state, folder.path() / "a");
  checkpoint::save(state, folder.path() / "b");
  const auto same = run({"diff", folder.path() / "a", folder.path() / "b"});
  EXPECT_EQ(same.status, 0);
  EXPECT_EQ(same.output, "the same\n");

  state.tensor("layer.weight")[3][4] += 0.5;
  state.tensor("layer.weight")[5][6] -= 2;
  state.set("step", 13);
  state.erase("count");
  state.add("more", torch::zeros({1}));
  checkpoint::save(state, folder.path() / "c");
  const auto result = run({"diff", folder.path() / "a", folder.path() / "c"});
  EXPECT_EQ(result.status, 1);
  EXPECT_EQ(result.output,
            "step: {\"i64\":12} and {\"i64\":13}\ncount: only in the first\nmore: only in the second\n"
            "layer.weight: 2 of 600 elements differ, by at most 2\n");
}

TEST(CheckpointTool, DiffSaysByHowMuchAlsoBesideInfinitiesAndNan) {
  const TemporaryFolder folder;
  const auto save = [&](const char* name, const std::vector<float>& values, float imaginary) {
    StateDict state;
    state.add("w", torch::tensor(values));
    state.add("z", torch::complex(torch::ones({2}), torch::tensor({imaginary, 0.F})));
    checkpoint::save(state, folder.path() / name);
  };
  const auto inf = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  save("a", {-inf, nan, 1, 2}, 0);
  save("b", {-inf, nan, 1, 4}, 3);
  save("c", {-inf, 0, 1, 4}, 3);
  const auto diff = [&](const char* first, const char* second) {
    return run({"diff", folder.path() / first, folder.path() / second}).output;
  };
  EXPECT_EQ(diff("a", "b"), "w: 1 of 4 elements differ, by at most 2\nz: 1 of 2 elements differ, by at most 3\n");
  EXPECT_EQ(diff("b", "c"), "w: 1 of 4 elements differ, by at most nan\n");
}

TEST(CheckpointTool, AllNamesOfATiedTensorCount) {
  const TemporaryFolder folder;
  const auto path = [&](const char* name) { return (folder.path() / name).string(); };
  StateDict tied, apart;
  tied.add("embed.weight", torch::ones({4}), {"head.weight"});
  for (const auto* name : {"embed.weight", "head.weight"}) apart.add(name, torch::ones({4}));
  checkpoint::save(tied, path("tied"));
  checkpoint::save(apart, path("apart"));
  EXPECT_EQ(run({"diff", path("tied"), path("apart")}).output, "the same\n");
  apart.tensor("head.weight")[1] += 2;
  checkpoint::save(apart, path("other"));
  EXPECT_EQ(run({"diff", path("tied"), path("other")}).output, "head.weight: 1 of 4 elements differ, by at most 2\n");

  EXPECT_EQ(run({"convert", path("tied"), path("head"), "--exclude=embed."}).status, 0);
  EXPECT_EQ(run({"diff", path("tied"), path("head")}).output, "embed.weight: only in the first\n");
  EXPECT_THAT(run({"convert", path("tied"), path("dcp"), "--to=dcp"}).output, HasSubstr("a tensor once: head.weight"));
}

TEST(CheckpointTool, TheRanksOwnValuesGoWithTheirTensor) {
  const TemporaryFolder folder;
  const auto path = [&](const char* name) { return (folder.path() / name).string(); };
  StateDict state;
  state.add("a.w", torch::zeros({4}), {"b.w"});
  state.add("a.w.rank1", torch::ones({4}));
  state.add("b.w.rank1", torch::full({4}, 2.0));
  checkpoint::save(state, path("ours"));
  auto index = internal::read_index(path("ours"));
  for (auto& tensor : index.tensors) {
    if (tensor.name == "a.w.rank1") tensor.copy = {"a.w", 1};
  }
  testing::write_text(folder.path() / "ours" / internal::kIndexName, internal::encode_index(index));
  const auto copies = [&](const std::string& target, const std::string& exclude) {
    EXPECT_EQ(run({"convert", path("ours"), folder.path() / target, "--exclude=" + exclude}).status, 0);
    EXPECT_TRUE(checkpoint::verify(folder.path() / target).empty());
    std::vector<std::string> names;
    for (const auto& tensor : internal::read_index(folder.path() / target).tensors) {
      if (!tensor.copy.of.empty()) names.push_back(c10::str(tensor.name, " of ", tensor.copy.of, " on ", tensor.copy.rank));
    }
    return names;
  };
  EXPECT_THAT(copies("all", "none."), ::testing::ElementsAre("a.w.rank1 of a.w on 1"));
  EXPECT_THAT(copies("second", "a."), ::testing::ElementsAre("b.w.rank1.rank1 of b.w on 1"));
  EXPECT_THAT(copies("none", "a.,b."), ::testing::IsEmpty());
  EXPECT_THAT(copies("first", "a.w.rank"), ::testing::IsEmpty()); // by a name of its own
  StateDict read;                                                 // the values are those of rank 1, under a name that is free
  read.add("b.w.rank1.rank1", torch::zeros({4}));
  index = internal::read_index(path("second"));
  for (auto& tensor : index.tensors) tensor.copy = {};
  testing::write_text(folder.path() / "second" / internal::kIndexName, internal::encode_index(index));
  checkpoint::load(read, path("second"), {.allow_unused = true});
  EXPECT_TRUE(torch::equal(read.tensor("b.w.rank1.rank1"), torch::ones({4})));
}

TEST(CheckpointTool, ConvertsRoundTheFormats) {
  const TemporaryFolder folder;
  const auto path = [&](const char* name) { return (folder.path() / name).string(); };
  auto state = example();
  checkpoint::save(state, path("ours"));
  EXPECT_EQ(run({"convert", path("ours"), path("again")}).status, 0);
  EXPECT_EQ(run({"diff", path("ours"), path("again")}).output, "the same\n");

  const auto converted =
      run({"convert", path("ours"), path("hf"), "--to=hugging-face", "--exclude=optimizer.", "--max_file_bytes=1000"});
  EXPECT_EQ(converted.status, 0) << converted.output;
  EXPECT_THAT(converted.output,
              HasSubstr("left out, because the format holds no values, and a tensor once: head.weight, step, name"));
  EXPECT_TRUE(std::filesystem::exists(folder.path() / "hf" / "model.safetensors.index.json"));
  EXPECT_EQ(run({"convert", path("hf"), path("dcp"), "--to=dcp"}).status, 0);
  EXPECT_EQ(run({"diff", path("hf"), path("dcp")}).output, "the same\n");
  EXPECT_EQ(run({"convert", path("dcp"), path("back")}).status, 0);
  EXPECT_EQ(run({"diff", path("ours"), path("back")}).output,
            "name: only in the first\nstep: only in the first\nhead.weight: only in the first\n"
            "optimizer.state.layer.bias.exp_avg: only in the first\n");
  EXPECT_EQ(run({"verify", path("back")}).status, 0);
  EXPECT_THAT(run({"verify", path("dcp")}).output, HasSubstr("there are no checksums"));
}

TEST(CheckpointTool, MistakesAreErrors) {
  const TemporaryFolder folder;
  checkpoint::save(example(), folder.path() / "c");
  const auto path = (folder.path() / "c").string();
  EXPECT_EQ(run({}).status, 2);
  EXPECT_THAT(run({}).output, HasSubstr("a .pt\nfile of torch.save or torch::save"));
  EXPECT_EQ(run({"inspect"}).status, 2);
  EXPECT_THAT(run({"show", "x"}).output, HasSubstr("no command 'show' with 1 paths"));
  EXPECT_THAT(run({"inspect", path + "x"}).output,
              HasSubstr("tessera-checkpoint: " + path + "x is not a checkpoint: no such folder"));
  EXPECT_THAT(run({"convert", path, path}).output, HasSubstr("exists already"));
  EXPECT_THAT(run({"convert", path, path + "x", "--to=zip"}).output, HasSubstr("--to=zip: not one of"));
  EXPECT_THAT(run({"convert", path, path + "x", "--dtype=BF16"}).output, HasSubstr("--dtype needs --to=hugging-face"));
}

} // namespace
} // namespace tessera::tessera_checkpoint_test
