// Texts for people: tables, lists of names, messages of errors.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <tessera/base/edit_distance.h>
#include <tessera/base/error_text.h>
#include <tessera/base/host_name.h>
#include <tessera/base/listing.h>
#include <tessera/base/text_table.h>

namespace tessera::testing::text_test {
namespace {

using internal::error_text, internal::listing, internal::text_table;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::Not;

TEST(TextTable, AlignsNumbersToTheRight) {
  EXPECT_EQ(text_table({{"name", "bytes", "place"}, {"w", "12", "host"}, {"longer", "3", ""}}, {"bytes"}),
            "name    bytes  place\n"
            "w          12  host\n"
            "longer      3\n");
}

TEST(EditDistance, CountsCharactersPutInTakenOutAndReplaced) {
  using internal::edit_distance;
  EXPECT_EQ(edit_distance("", ""), 0U);
  EXPECT_EQ(edit_distance("", "abc"), 3U);
  EXPECT_EQ(edit_distance("weight", ""), 6U);
  EXPECT_EQ(edit_distance("blocks.0.weight", "blocks.1.weight"), 1U);
  EXPECT_EQ(edit_distance("kitten", "sitting"), 3U);
  EXPECT_EQ(internal::nearest_of("rate", {"ranks", "grate", "gate"}), "grate");
  EXPECT_EQ(internal::nearest_of("rate", {}), "");
}

TEST(TextTable, OfHeadingsAloneIsALine) { EXPECT_EQ(text_table({{"a", "b"}}), "a  b\n"); }

TEST(TextTable, LeavesOutEmptyEndsOfLines) { EXPECT_EQ(text_table({{"a", "b"}, {"", ""}}, {"a"}), "a  b\n\n"); }

TEST(Listing, NamesTwentyAndCountsTheRest) {
  EXPECT_EQ(listing({}), "");
  EXPECT_EQ(listing({"a", "b"}), "\n  a\n  b");
  std::vector<std::string> names(20, "x");
  EXPECT_THAT(listing(names), Not(HasSubstr("more")));
  names.insert(names.end(), {"y", "z", "z"});
  EXPECT_THAT(listing(names), EndsWith("\n  x\n  and 3 more"));
}

TEST(ErrorText, LeavesOutTheStackOfLibTorchsErrors) {
  try {
    TORCH_CHECK(false, "the value was ", 7);
  } catch (const c10::Error& error) {
    EXPECT_NE(std::string(error.what()), "the value was 7");
    EXPECT_EQ(error_text(error), "the value was 7");
  }
}

TEST(ErrorText, IsNeverEmpty) {
  EXPECT_EQ(error_text(std::runtime_error("why")), "why");
  EXPECT_EQ(error_text(std::runtime_error("")), "std::runtime_error without a text");
}

TEST(ErrorText, TakesWhateverWasThrown) {
  const auto text_of = [](auto thrown) { return error_text(std::make_exception_ptr(std::move(thrown))); };
  EXPECT_EQ(text_of(std::out_of_range("index 3")), "index 3");
  EXPECT_EQ(text_of(3), "an exception that is no std::exception");
}

TEST(HostName, IsThatOfTheMachine) {
  EXPECT_EQ(internal::host_name(), internal::host_name());
  EXPECT_THAT(internal::boot_id(), Not(HasSubstr("\n")));
}

} // namespace
} // namespace tessera::testing::text_test
