// PyTorch's native checkpoints. fixtures/distcp was written by torch 2.11 on two ranks (interop.py writes such folders too).
#include <tessera/checkpoint/checkpoint.h>
#include <tessera/checkpoint/distcp.h>
#include <tessera/checkpoint/pickle.h>

#include "temporary_folder.h"

namespace tessera::checkpoint {
namespace {

using testing::error_of;
using ::testing::HasSubstr;
using testing::read_text;
using testing::TemporaryFolder;
using testing::write_text;

const std::filesystem::path kFixture = std::filesystem::path(TESSERA_FIXTURES) / "distcp";

StateDict fixture_state() {
  StateDict state;
  state.add("a", torch::zeros({5, 3}));
  state.add("b", torch::zeros({3, 5}, at::kBFloat16));
  state.add("r", torch::zeros({4}, at::kLong));
  state.add("s", torch::zeros({}));
  state.add("nested.list.0", torch::zeros({2}));
  state.add("nested.list.1", torch::ones({3}));
  state.set("step", 0);
  state.set("nested.rate", 0.0);
  state.set("nested.flag", false);
  state.set("nested.names", StateValue(std::vector<std::string>{}));
  return state; // nested.t, a tuple of an integer and a float, is left out
}

TEST(Distcp, LoadsTensorsAndValues) {
  auto state = fixture_state();
  const auto report = load(state, kFixture);
  EXPECT_TRUE(report.missing.empty());
  EXPECT_TRUE(torch::equal(state.tensor("a"), torch::arange(15.).view({5, 3})));
  EXPECT_TRUE(torch::equal(state.tensor("b"), torch::arange(15).view({3, 5}).to(at::kBFloat16)));
  EXPECT_TRUE(torch::equal(state.tensor("r"), torch::arange(4)));
  EXPECT_EQ(state.tensor("s").item<double>(), 2.5);
  EXPECT_TRUE(torch::equal(state.tensor("nested.list.0"), torch::ones({2})));
  EXPECT_EQ(state.value<int64_t>("step"), 7);
  EXPECT_EQ(state.value<double>("nested.rate"), 0.5);
  EXPECT_TRUE(state.value<bool>("nested.flag"));
  EXPECT_EQ(state.value<std::vector<std::string>>("nested.names"), (std::vector<std::string>{"a", "b"}));
  EXPECT_TRUE(verify(kFixture).empty());
}

TEST(Distcp, MissingAndShortFilesAreErrorsThatNameThem) {
  const TemporaryFolder folder;
  const auto copy = folder.path() / "c";
  const auto error = [&] { return error_of([&] { index_of_distcp(copy); }); };
  std::filesystem::copy(kFixture, copy);
  EXPECT_EQ(error(), "");
  const auto whole = read_text(copy / "__1_0.distcp");
  write_text(copy / "__1_0.distcp", whole.substr(0, whole.size() - 1));
  EXPECT_THAT(error(), HasSubstr("__1_0.distcp"));
  std::filesystem::remove(copy / "__1_0.distcp");
  EXPECT_THAT(error(), HasSubstr("__1_0.distcp: No such file or directory"));
  write_text(copy / ".metadata", "\x80\x04N.");
  EXPECT_THAT(error(), HasSubstr(".metadata: not the metadata of a distributed checkpoint"));
}

std::string pickle_error(const std::string& text) {
  return error_of([&] { Pickle(text, "file"); });
}

TEST(Pickle, ReadsValues) {
  using std::string_literals::operator""s;
  const Pickle numbers("\x80\x02(K\x05M\x01\x02J\xff\xff\xff\xff\x8a\x02\x00\x80G?\xe0\x00\x00\x00\x00\x00\x00\x88Nt."s, "file");
  const auto& items = pickle_items(numbers.root(), "file");
  ASSERT_EQ(items.size(), 7);
  EXPECT_EQ(pickle_as<int64_t>(items[0], ""), 5);
  EXPECT_EQ(pickle_as<int64_t>(items[1], ""), 513);
  EXPECT_EQ(pickle_as<int64_t>(items[2], ""), -1);
  EXPECT_EQ(pickle_as<int64_t>(items[3], ""), -32768);
  EXPECT_EQ(std::get<double>(*items[4]), 0.5);
  EXPECT_TRUE(pickle_as<bool>(items[5], ""));
  const Pickle dict("\x80\x04}(\x8c\x01"s + "a]K\x01" + "a\x8c\x01" + "bcos\nsystem\n\x8c\x02rm\x85Ru."s, "file");
  const auto& fields = pickle_as<PickleDict>(dict.root(), "");
  EXPECT_EQ(pickle_items(pickle_find(fields, "a"), "").size(), 1);
  EXPECT_EQ(pickle_class(pickle_find(fields, "b")), "os.system"); // a name, which nobody calls
  EXPECT_EQ(pickle_find(fields, "c"), nullptr);
}

TEST(Pickle, ListsThatHoldThemselvesAreFreed) {
  const Pickle circle(
      "]q\x01h\x01"
      "a.",
      "file");
  EXPECT_EQ(pickle_items(circle.root(), "")[0], circle.root());
}

TEST(Pickle, DamageIsAnErrorThatSaysWhere) {
  using std::string_literals::operator""s;
  const std::vector<std::pair<std::string, std::string>> cases{
      {"", "file: pickle ends too early (byte 0 of 0)"},
      {"N", "ends too early"},
      {"\x80\x06N.", "unknown protocol"},
      {"\xfeN.", "unknown opcode 254"},
      {".", "does not end with one value"},
      {"NN.", "does not end with one value"},
      {"N(.", "does not end with one value"},
      {"a.", "takes a value that is not there"},
      {"(\x85.", "takes a value that is not there"},
      {"t.", "takes a mark that is not there"},
      {"NNa.", "value of the wrong kind"},
      {"}Na.", "value of the wrong kind"},
      {"}(Nu.", "key without a value"},
      {"h\x05.", "recalls a value that it did not store"},
      {"\x8a\x09"
       "123456789.",
       "integer beyond 64 bits"},
      {"\x8a\xff", "integer beyond 64 bits"},
      {"X\xff\xff\xff\xff.", "ends too early"},
      {"\x8d\xff\xff\xff\xff\xff\xff\xff\xff.", "ends too early"},
      {"NN\x93.", "names a class by something else than text"},
      {"cos", "ends too early"},
      {"NNb.", "value of the wrong kind"},
  };
  for (const auto& [text, expected] : cases)
    EXPECT_THAT(pickle_error(text), HasSubstr(expected)) << ::testing::PrintToString(text);
}

} // namespace
} // namespace tessera::checkpoint
