// PyTorch's native checkpoints. fixtures/distcp was written by torch 2.11 on two ranks (interop.py writes such folders too).
#include <caffe2/serialize/inline_container.h>
#include <gmock/gmock.h>
#include <tessera/checkpoint/bytes/pickle.h>
#include <tessera/checkpoint/checkpoint.h>
#include <tessera/checkpoint/formats/distcp.h>
#include <torch/torch.h>

#include <tessera/tests/checkpoint/torch_archives.h>
#include <tessera/tests/support/matchers.h>
#include <tessera/tests/support/temporary_folder.h>

namespace tessera::checkpoint::distcp_test {
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
  state.set("nested.t", StateValue(std::vector<double>{})); // a tuple of an integer and a float
  return state;
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
  EXPECT_EQ(state.value<std::vector<double>>("nested.t"), (std::vector<double>{1, 2.5}));
  EXPECT_TRUE(verify(kFixture).empty());
}

TEST(Distcp, MissingAndShortFilesAreErrorsThatNameThem) {
  const TemporaryFolder folder;
  const auto copy = folder.path() / "c";
  const auto error = [&] { return error_of([&] { internal::index_of_distcp(copy); }); };
  std::filesystem::copy(kFixture, copy);
  EXPECT_EQ(error(), "no error");
  const auto whole = read_text(copy / "__1_0.distcp");
  write_text(copy / "__1_0.distcp", whole.substr(0, whole.size() - 1));
  EXPECT_THAT(error(), HasSubstr("__1_0.distcp"));
  std::filesystem::remove(copy / "__1_0.distcp");
  EXPECT_THAT(error(), HasSubstr("__1_0.distcp: No such file or directory"));
  write_text(copy / ".metadata", "\x80\x04N.");
  EXPECT_THAT(error(), HasSubstr(".metadata: not the metadata of a distributed checkpoint"));
}

// Pickles, put together by hand.
std::string text(const std::string& value) { return "X" + std::string{static_cast<char>(value.size()), 0, 0, 0} + value; }
std::string number(int64_t value) { return "\x8a\x08" + std::string(reinterpret_cast<const char*>(&value), 8); }
std::string object(const std::string& name, const std::vector<std::pair<std::string, std::string>>& fields) {
  std::string state = "}(";
  for (const auto& [field, value] : fields) state += text(field) + value;
  return "ctorch.distributed.checkpoint.metadata\n" + name + "\n)\x81" + state + "ub";
}
std::string repeated(const std::string& value, int times) {
  std::string all;
  for (int i = 0; i < times; ++i) all += value;
  return all;
}
void write_metadata(const std::filesystem::path& folder, const std::string& entries, const std::string& items) {
  const auto dict = [](const std::string& content) { return "}(" + content + "u"; };
  write_text(folder / ".metadata",
             "\x80\x02" + object("Metadata", {{"state_dict_metadata", dict(entries)}, {"storage_data", dict(items)}}) + ".");
}

// `.metadata` may name the same objects again and again.
TEST(Distcp, WhatItHoldsDoesNotOutgrowItsFiles) {
  const TemporaryFolder folder;
  const auto error = [&] { return error_of([&] { internal::index_of_distcp(folder.path()); }); };
  const auto chunk = object("ChunkStorageMetadata", {{"offsets", "(" + number(0) + "t"}, {"sizes", "(" + number(0) + "t"}});
  const auto tensor = [&](const std::string& chunks) {
    const std::string properties = "ctorch.distributed.checkpoint.metadata\nTensorProperties\n)\x81(ctorch\nfloat32\ntb";
    return object("TensorStorageMetadata", {{"properties", properties}, {"size", "(" + number(0) + "t"}, {"chunks", chunks}});
  };
  auto entries = text("first") + tensor("](" + chunk + "q\x01" + repeated("h\x01", 999) + "eq\x02");
  write_metadata(folder.path(), entries, "");
  EXPECT_THAT(error(), HasSubstr("tensor \"first\" lists chunks that other tensors list too"));
  entries = text("first") + tensor("](" + repeated(chunk, 90) + "eq\x02");
  write_metadata(folder.path(), entries, "");
  EXPECT_EQ(error(), "no error");
  for (int i = 0; i < 99; ++i) entries += text(std::to_string(i)) + tensor("h\x02");
  write_metadata(folder.path(), entries, "");
  EXPECT_THAT(error(), ::testing::EndsWith("lists chunks that other tensors list too"));
  write_metadata(folder.path(), text("twice") + tensor("]") + text("twice") + tensor("]"), "");
  EXPECT_THAT(error(), HasSubstr("tensor \"twice\" appears twice"));

  const auto write_item = [&](const std::string& pickle) {
    caffe2::serialize::PyTorchStreamWriter writer((folder.path() / "x.distcp").string());
    writer.writeRecord("data.pkl", pickle.data(), pickle.size());
    writer.writeEndOfFile();
    const auto bytes = static_cast<int64_t>(std::filesystem::file_size(folder.path() / "x.distcp"));
    return object("_StorageInfo", {{"relative_path", text("x.distcp")}, {"offset", number(0)}, {"length", number(bytes)}});
  };
  const auto key = [](const std::string& name) { return object("MetadataIndex", {{"fqn", text(name)}}); };
  auto item = write_item("\x80\x02](" + text("a") + text("b") + "e.");
  write_metadata(folder.path(), "", key("one") + item);
  EXPECT_EQ(internal::index_of_distcp(folder.path()).values[0].second, StateValue(std::vector<std::string>{"a", "b"}));
  write_metadata(folder.path(), "", key("one") + item + "q\x03" + key("two") + "h\x03");
  EXPECT_THAT(error(), HasSubstr("x.distcp: \"two\": the items of this file overlap"));
  item = write_item("\x80\x02](" + text(std::string(100, 'x')) + "q\x01" + repeated("h\x01", 100) + "e.");
  write_metadata(folder.path(), "", key("one") + item);
  EXPECT_EQ(error(), "no error");
  item = write_item("\x80\x02](" + text(std::string(255, 'x')) + "q\x01" + repeated("h\x01", 30'000) + "e.");
  write_metadata(folder.path(), "", key("one") + item);
  EXPECT_THAT(internal::index_of_distcp(folder.path()).values, ::testing::IsEmpty()); // passed over: 7,650,255 bytes of text
}

// One tensor "w" without a second dim, whose item holds this pickle.
void write_tensor(const std::filesystem::path& folder, const std::string& dtype, int64_t elements, const std::string& pickle,
                  const std::string& data, bool compress = false) {
  const auto tuple_of = [](int64_t value) { return "(" + number(value) + "t"; };
  testing::write_archive(folder / "x.distcp", pickle, data, compress);
  const auto bytes = static_cast<int64_t>(std::filesystem::file_size(folder / "x.distcp"));
  const auto properties = "ctorch.distributed.checkpoint.metadata\nTensorProperties\n)\x81(ctorch\n" + dtype + "\ntb";
  const auto chunk = object("ChunkStorageMetadata", {{"offsets", tuple_of(0)}, {"sizes", tuple_of(elements)}});
  const auto entry =
      object("TensorStorageMetadata", {{"properties", properties}, {"size", tuple_of(elements)}, {"chunks", "](" + chunk + "e"}});
  const auto info =
      object("_StorageInfo", {{"relative_path", text("x.distcp")}, {"offset", number(0)}, {"length", number(bytes)}});
  write_metadata(folder, text("w") + entry, object("MetadataIndex", {{"fqn", text("w")}, {"offset", tuple_of(0)}}) + info);
}

// Python has no storage class for these.
TEST(Distcp, DtypesThatAreStoredAsBytesAreRead) {
  const TemporaryFolder folder;
  for (const auto dtype : {at::kFloat8_e4m3fn, at::kUInt16}) {
    const auto values = torch::arange(3).to(dtype);
    const auto pickle = testing::pickle_of(
        [&](internal::PickleWriter& out) { internal::write_tensor(out, dtype, {3}, "0", /*for_python=*/true); });
    const std::string data(static_cast<const char*>(values.const_data_ptr()), values.nbytes());
    write_tensor(folder.path(), dtype == at::kUInt16 ? "uint16" : "float8_e4m3fn", 3, pickle, data);
    StateDict state;
    state.add("w", torch::zeros({3}, dtype));
    load(state, folder.path());
    EXPECT_TENSORS_EQUAL(state.tensor("w").to(at::kFloat), torch::arange(3).to(at::kFloat));
    write_tensor(folder.path(), "float32", 3, pickle, data);
    EXPECT_THAT(error_of([&] { internal::index_of_distcp(folder.path()); }),
                HasSubstr(c10::str("\"w\": its part at [0] is stored as ", dtype, " and listed as Float")));
  }
}

TEST(Distcp, ViewsAndCompressedDataAreErrors) {
  const TemporaryFolder folder;
  const auto error_with = [&](const std::string& bit, bool compress) {
    const auto pickle = testing::pickle_of([&](internal::PickleWriter& out) { testing::write_view(out, bit); });
    write_tensor(folder.path(), "complex64", 2, pickle, std::string(16, '\0'), compress);
    return error_of([&] { internal::index_of_distcp(folder.path()); });
  };
  EXPECT_EQ(error_with("", false), "no error");
  for (const auto* bit : {"conj", "neg"}) {
    EXPECT_THAT(error_with(bit, false), HasSubstr("\"w\": its part at [0] is stored as a conjugate or negative view"));
  }
  EXPECT_THAT(error_with("", true), HasSubstr("\"w\": its part at [0]: its data is compressed"));
}

TEST(Distcp, ObjectsWithManyFieldsAreAnError) {
  std::vector<std::pair<std::string, std::string>> fields;
  for (int i = 0; i < 65; ++i) fields.emplace_back(std::to_string(i), "N");
  const internal::Pickle pickle(object("Metadata", fields) + ".", "file");
  EXPECT_EQ(error_of([&] { internal::pickle_field(pickle.root(), "1", "file"); }), "file is an object with 65 fields");
}

std::string pickle_error(const std::string& text) {
  return error_of([&] { internal::Pickle(text, "file"); });
}

std::string pickle_as_bytes(const internal::Pickle& pickle) { return std::get<internal::PickleBytes>(*pickle.root()).bytes; }

TEST(Pickle, ReadsValues) {
  using std::string_literals::operator""s;
  const internal::Pickle numbers("\x80\x02(K\x05M\x01\x02J\xff\xff\xff\xff\x8a\x02\x00\x80G?\xe0\x00\x00\x00\x00\x00\x00\x88Nt."s,
                                 "file");
  const auto& items = internal::pickle_items(numbers.root(), "file");
  ASSERT_EQ(items.size(), 7);
  EXPECT_EQ(internal::pickle_as<int64_t>(items[0], ""), 5);
  EXPECT_EQ(internal::pickle_as<int64_t>(items[1], ""), 513);
  EXPECT_EQ(internal::pickle_as<int64_t>(items[2], ""), -1);
  EXPECT_EQ(internal::pickle_as<int64_t>(items[3], ""), -32768);
  EXPECT_EQ(std::get<double>(*items[4]), 0.5);
  EXPECT_TRUE(internal::pickle_as<bool>(items[5], ""));
  const internal::Pickle wide(
      "\x8a\x09"
      "123456789.",
      "file"); // an integer beyond 64 bits
  EXPECT_EQ(pickle_as_bytes(wide), "123456789");
  const internal::Pickle dict("\x80\x04}(\x8c\x01"s + "a]K\x01" + "a\x8c\x01" + "bcos\nsystem\n\x8c\x02rm\x85Ru."s, "file");
  const auto& fields = internal::pickle_as<internal::PickleDict>(dict.root(), "");
  EXPECT_EQ(internal::pickle_items(internal::pickle_find(fields, "a"), "").size(), 1);
  EXPECT_EQ(internal::pickle_class(internal::pickle_find(fields, "b")), "os.system"); // a name, which nobody calls
  EXPECT_EQ(internal::pickle_find(fields, "c"), nullptr);
}

TEST(Pickle, ListsThatHoldThemselvesAreFreed) {
  const internal::Pickle circle(
      "]q\x01h\x01"
      "a.",
      "file");
  EXPECT_EQ(internal::pickle_items(circle.root(), "")[0], circle.root());
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
      {"\x8a\xff", "ends too early"},
      {"\x8b\xff\xff\xff\xff.", "ends too early"},
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
} // namespace tessera::checkpoint::distcp_test
