#include <gmock/gmock.h>
#include <tessera/checkpoint/bytes/file.h>
#include <tessera/checkpoint/formats/safetensors.h>
#include <torch/torch.h>

#include <tessera/tests/support/matchers.h>
#include <tessera/tests/support/temporary_folder.h>

namespace tessera::checkpoint::safetensors_test {
namespace {

using testing::error_of;
using ::testing::HasSubstr;
using testing::TemporaryFolder;
using testing::write_text;

std::string prefix_of(const std::string& json) {
  const auto length = static_cast<uint64_t>(json.size());
  return std::string(reinterpret_cast<const char*>(&length), 8) + json;
}

std::string parse_error(const std::string& json, int64_t data_bytes) {
  const auto prefix = prefix_of(json);
  return error_of([&] { internal::parse_safetensors(prefix, static_cast<int64_t>(prefix.size()) + data_bytes, "file"); });
}

TEST(Safetensors, HeaderComesBack) {
  internal::SafetensorsHeader header;
  header.tensors = {
      {"a", at::kDouble, {2, 3}}, {"scalar", at::kFloat, {}}, {"empty", at::kLong, {0, 4}}, {"b", at::kBFloat16, {5}}};
  header.metadata = {{"format", "pt"}, {"quote", "\"\n"}};
  const auto prefix = internal::encode_safetensors(header, "file");
  EXPECT_EQ(prefix.size() % 8, 0);
  EXPECT_EQ(static_cast<int64_t>(prefix.size()), header.data_begin);
  const auto parsed = internal::parse_safetensors(prefix, header.data_begin + 48 + 4 + 10, "file");
  EXPECT_EQ(parsed.metadata, header.metadata);
  ASSERT_EQ(parsed.tensors.size(), 4);
  for (const auto& tensor : header.tensors) {
    const auto same =
        std::find_if(parsed.tensors.begin(), parsed.tensors.end(), [&](const auto& t) { return t.name == tensor.name; });
    ASSERT_NE(same, parsed.tensors.end());
    EXPECT_EQ(same->dtype, tensor.dtype);
    EXPECT_EQ(same->sizes, tensor.sizes);
    EXPECT_EQ(same->begin, tensor.begin);
    EXPECT_EQ(same->end, tensor.end);
  }
}

TEST(Safetensors, EveryDtypeHasItsName) {
  for (const auto dtype :
       {at::kBool, at::kByte, at::kChar, at::kShort, at::kInt, at::kLong, at::kHalf, at::kBFloat16, at::kFloat, at::kDouble,
        at::kFloat8_e4m3fn, at::kFloat8_e5m2, at::kUInt16, at::kUInt32, at::kUInt64, at::kComplexFloat}) {
    EXPECT_EQ(internal::dtype_from_safetensors(internal::safetensors_dtype(dtype, "t"), "t"), dtype);
  }
  EXPECT_THAT(error_of([] { internal::safetensors_dtype(at::kComplexDouble, "tensor \"t\""); }),
              HasSubstr("tensor \"t\": the safetensors format has no dtype ComplexDouble"));
}

TEST(Safetensors, MalformedHeadersAreErrorsThatNameTheTensor) {
  const auto tensor = [](const std::string& fields) { return "{\"w\":{" + fields + "}}"; };
  EXPECT_EQ(parse_error(tensor(R"("dtype":"F32","shape":[2],"data_offsets":[0,8])"), 8), "no error");
  const std::vector<std::tuple<std::string, int64_t, std::string>> cases{
      {"", 0, "does not start with '{'"},
      {"[]", 0, "does not start with '{'"},
      {"{", 0, "not valid JSON"},
      {"{} {}", 0, "not valid JSON"},
      {R"({"w":1})", 0, "tensor \"w\" is not an object"},
      {tensor(R"("shape":[2],"data_offsets":[0,8])"), 8, "tensor \"w\" lacks the field \"dtype\""},
      {tensor(R"("dtype":"F33","shape":[2],"data_offsets":[0,8])"), 8, "tensor \"w\" has the unknown dtype \"F33\""},
      {tensor(R"("dtype":"F32","shape":[3],"data_offsets":[0,8])"), 8, "tensor \"w\" has data of another size"},
      {tensor(R"("dtype":"F32","shape":[-2],"data_offsets":[0,8])"), 8, "tensor \"w\".shape[0] is negative"},
      {tensor(R"("dtype":"F32","shape":[2.0],"data_offsets":[0,8])"), 8, "tensor \"w\".shape[0] is not a 64-bit integer"},
      {tensor(R"("dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,0])"), 0,
       "tensor \"w\" has data of another size"},
      {tensor(R"("dtype":"F32","shape":[99999999999999999999],"data_offsets":[0,0])"), 0,
       "tensor \"w\".shape[0] is not a 64-bit integer"},
      {tensor(R"("dtype":"F32","shape":[2],"data_offsets":[8,0])"), 8, "tensor \"w\" has data_offsets that are no range"},
      {tensor(R"("dtype":"F32","shape":[2],"data_offsets":[0,8,9])"), 8, "tensor \"w\" has data_offsets that are no range"},
      {tensor(R"("dtype":"F32","shape":[2],"data_offsets":[0,8])"), 4, "tensor \"w\" ends at byte 8 of the data, which has 4"},
      {tensor(R"("dtype":"F32","shape":[2],"data_offsets":[0,8])"), 12, "the tensors end at byte"},
      {tensor(R"("dtype":"F32","shape":[2],"data_offsets":[4,12])"), 12, "tensor \"w\" starts at byte"},
      {R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"b":{"dtype":"U8","shape":[4],"data_offsets":[2,6]}})", 6,
       "tensor \"b\" starts at byte"},
      {R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})", 1,
       "key \"a\" appears twice"},
      {R"({"__metadata__":{"format":1}})", 0, "__metadata__.format is not a string"},
      {"{\"w\":" + std::string(100000, '['), 0, "nested deeper"},
      {"{\"\xff\":{}}", 0, "not valid JSON"},
  };
  for (const auto& [json, bytes, expected] : cases)
    EXPECT_THAT(parse_error(json, bytes), HasSubstr(expected)) << json.substr(0, 200);
}

TEST(Safetensors, FilesTooShortForTheirHeaderAreErrors) {
  const TemporaryFolder folder;
  const auto path = folder.path() / "file.safetensors";
  const auto error_for = [&](const std::string& bytes) {
    write_text(path, bytes);
    return error_of([&] { internal::read_safetensors_prefix(internal::File::open(path)); });
  };
  EXPECT_THAT(error_for(""), HasSubstr("0 bytes are too few"));
  EXPECT_THAT(error_for("1234567"), HasSubstr("7 bytes are too few"));
  EXPECT_THAT(error_for(prefix_of("{}").substr(0, 9)), HasSubstr("a header of 2 bytes in a file of 9"));
  EXPECT_THAT(error_for(std::string(16, '\xff')), HasSubstr("a header of 18446744073709551615 bytes in a file of 16"));
  EXPECT_EQ(error_for(prefix_of("{}")), "no error");
  EXPECT_THAT(error_of([&] { internal::File::open(folder.path() / "none"); }), HasSubstr("none: No such file or directory"));
  EXPECT_THAT(error_of([&] { internal::File::open(folder.path()); }), HasSubstr("not a regular file"));
}

TEST(Safetensors, NamesThatCannotBeWrittenAreErrors) {
  internal::SafetensorsHeader twice, reserved, binary;
  twice.tensors = {{"a", at::kFloat, {1}}, {"a", at::kFloat, {1}}};
  EXPECT_THAT(error_of([&] { internal::encode_safetensors(twice, "file"); }), HasSubstr("\"a\" is reserved or appears twice"));
  reserved.tensors = {{"__metadata__", at::kFloat, {1}}};
  reserved.metadata = {{"format", "pt"}};
  EXPECT_EQ(error_of([&] { internal::encode_safetensors(reserved, "file"); }),
            "file: tensor name \"__metadata__\" is reserved or appears twice");
  binary.tensors = {{"\xff", at::kFloat, {1}}};
  EXPECT_THAT(error_of([&] { internal::encode_safetensors(binary, "file"); }), HasSubstr("cannot be written as JSON"));
}

} // namespace
} // namespace tessera::checkpoint::safetensors_test
