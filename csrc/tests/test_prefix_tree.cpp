// The prefix tree: a hit is the very text, and nothing stays that nothing holds.
#include "engine/prefix_tree.h"

#include <gtest/gtest.h>

#include <map>
#include <random>
#include <string>
#include <vector>

namespace quartz::engine {
namespace {

using Tokens = std::vector<int32_t>;

TEST(PrefixTree, FindsTheTextUnderItsParentAlone) {
  PrefixTree tree(2, 1, 100);
  const Tokens ab{1, 2}, cd{3, 4};
  const int32_t root = tree.root("");
  tree.pin(root);
  EXPECT_EQ(tree.find(root, ab.data()), -1);
  const int32_t first = tree.add(root, ab.data());
  tree.attach(first, 0, 7);
  EXPECT_EQ(tree.add(root, ab.data()), first);
  EXPECT_EQ(tree.find(root, ab.data()), first);
  EXPECT_EQ(tree.find(first, ab.data()), -1);
  EXPECT_EQ(tree.find(root, cd.data()), -1);
  EXPECT_EQ(tree.block(first, 0), 7);
  tree.check();
}

TEST(PrefixTree, NamespacesShareNothing) {
  PrefixTree tree(1, 1, 100);
  const Tokens token{5};
  const int32_t a = tree.root("x"), b = tree.root(std::string_view("x\0", 2));
  EXPECT_NE(a, b);
  tree.attach(tree.add(a, token.data()), 0, 1);
  EXPECT_EQ(tree.find(b, token.data()), -1);
  EXPECT_EQ(tree.root("x"), a);
}

TEST(PrefixTree, ANodeGoesWithItsLastBlockPinAndChild) {
  PrefixTree tree(1, 2, 100);
  const Tokens t{1, 2, 3};
  const int32_t root = tree.root("");
  const int32_t a = tree.add(root, &t[0]), b = tree.add(a, &t[1]);
  tree.attach(a, 0, 1);
  tree.attach(b, 0, 2);
  tree.attach(b, 1, 2);
  EXPECT_EQ(tree.num_nodes(), 3);
  tree.detach(a, 0);  // stays as the parent of b
  EXPECT_EQ(tree.find(root, &t[0]), a);
  tree.pin(b);
  tree.detach(b, 0);
  tree.detach(b, 1);
  tree.check();
  EXPECT_EQ(tree.num_nodes(), 3);
  tree.unpin(b);
  EXPECT_EQ(tree.num_nodes(), 0);
  tree.check();
  EXPECT_EQ(tree.find(tree.root(""), &t[0]), -1);
}

TEST(PrefixTree, AFullTreeRefusesUntilSomethingGoes) {
  PrefixTree tree(1, 1, 3);
  const Tokens t{1, 2, 3};
  const int32_t root = tree.root("");
  tree.pin(root);
  const int32_t a = tree.add(root, &t[0]);
  tree.attach(a, 0, 0);
  tree.attach(tree.add(root, &t[1]), 0, 1);
  EXPECT_EQ(tree.add(root, &t[2]), -1);
  EXPECT_EQ(tree.root("other"), -1);
  tree.detach(a, 0);
  EXPECT_GE(tree.add(root, &t[2]), 0);
}

// Long chains and many namespaces, against a map of whole texts.
TEST(PrefixTree, RandomTextsAgainstAMap) {
  std::mt19937 random(3);
  PrefixTree tree(3, 1, 100000);
  std::map<std::pair<std::string, Tokens>, int32_t> model;  // text to block
  std::map<int32_t, std::pair<std::string, Tokens>> texts;  // block to text
  std::map<int32_t, int32_t> nodes;                         // block to node
  int32_t next = 0;
  for (int round = 0; round < 4000; ++round) {
    const std::string space(1, static_cast<char>('a' + random() % 3));
    Tokens text;
    int32_t node = tree.root(space);
    tree.pin(node);
    const auto depth = random() % 6;
    for (unsigned i = 0; i < depth; ++i) {
      for (int j = 0; j < 3; ++j) text.push_back(static_cast<int32_t>(random() % 2));
      const int32_t found = tree.find(node, text.data() + 3 * i);
      const auto expected = model.find({space, text});
      if (expected != model.end()) {
        ASSERT_GE(found, 0);
        ASSERT_EQ(tree.block(found, 0), expected->second);
      } else if (found >= 0) {
        ASSERT_EQ(tree.block(found, 0), -1);
      }
      const int32_t child = tree.add(node, text.data() + 3 * i);
      tree.pin(child);
      tree.unpin(node);
      node = child;
      if (tree.block(node, 0) < 0 && random() % 3 != 0) {
        tree.attach(node, 0, next);
        model[{space, text}] = next;
        texts[next] = {space, text};
        nodes[next++] = node;
      }
    }
    tree.unpin(node);
    while (!nodes.empty() && (nodes.size() > 40 || random() % 4 == 0)) {
      auto gone = nodes.begin();
      std::advance(gone, static_cast<long>(random() % nodes.size()));
      model.erase(texts.at(gone->first));
      tree.detach(gone->second, 0);
      nodes.erase(gone);
    }
    if (round % 50 == 0) tree.check();
  }
  for (const auto& [block, node] : nodes) tree.detach(node, 0);
  EXPECT_EQ(tree.num_nodes(), 0);
  tree.check();
}

TEST(PrefixTree, ManyNodesAreStillFound) {
  PrefixTree tree(1, 1, 100000);
  std::vector<int32_t> nodes;
  Tokens tokens;
  int32_t node = tree.root("");
  for (int32_t i = 0; i < 20000; ++i) {
    tokens.push_back(i % 7);
    node = tree.add(node, &tokens.back());
    tree.attach(node, 0, i);
    nodes.push_back(node);
  }
  node = tree.root("");
  for (int32_t i = 0; i < 20000; ++i) {
    node = tree.find(node, &tokens[static_cast<size_t>(i)]);
    ASSERT_EQ(node, nodes[static_cast<size_t>(i)]);
  }
  tree.check();
}

}  // namespace
}  // namespace quartz::engine
