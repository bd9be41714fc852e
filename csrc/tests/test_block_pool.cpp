// Blocks of a group: who gives the next one, and which cached one goes first.
#include "engine/block_pool.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <list>
#include <random>
#include <stdexcept>

namespace quartz::engine {
namespace {

TEST(BlockPool, GivesEveryBlockOnceAndThenNone) {
  BlockPool pool(5);
  std::vector<int32_t> taken;
  int32_t evicted;
  for (int i = 0; i < 5; ++i) {
    taken.push_back(pool.allocate(&evicted));
    EXPECT_EQ(evicted, -1);
  }
  std::sort(taken.begin(), taken.end());
  EXPECT_EQ(taken, (std::vector<int32_t>{0, 1, 2, 3, 4}));
  EXPECT_EQ(pool.allocate(&evicted), -1);
  EXPECT_EQ(pool.num_used(), 5);
  pool.release(3);
  EXPECT_EQ(pool.allocate(&evicted), 3);
}

TEST(BlockPool, EmptyBlocksGoBeforeCachedOnes) {
  BlockPool pool(2);
  int32_t evicted;
  const int32_t a = pool.allocate(&evicted), b = pool.allocate(&evicted);
  pool.set_node(a, 70);
  pool.release(a);
  pool.release(b);
  EXPECT_EQ(pool.num_cached(), 1);
  EXPECT_EQ(pool.allocate(&evicted), b);
  EXPECT_EQ(evicted, -1);
  EXPECT_EQ(pool.allocate(&evicted), a);
  EXPECT_EQ(evicted, 70);
  EXPECT_EQ(pool.node(a), -1);
}

TEST(BlockPool, TheCachedBlockUnusedForLongestGoesFirst) {
  BlockPool pool(3);
  int32_t evicted;
  for (int i = 0; i < 3; ++i) pool.set_node(pool.allocate(&evicted), i);
  for (const int32_t block : {1, 0, 2}) pool.release(block);
  pool.acquire(1);  // a hit: used again
  pool.release(1);
  std::vector<int32_t> order;
  for (int i = 0; i < 3; ++i) order.push_back(pool.allocate(&evicted));
  EXPECT_EQ(order, (std::vector<int32_t>{0, 2, 1}));
}

TEST(BlockPool, ASharedBlockIsFreeWhenItsLastReferenceGoes) {
  BlockPool pool(1);
  int32_t evicted;
  const int32_t block = pool.allocate(&evicted);
  pool.acquire(block);
  pool.release(block);
  EXPECT_EQ(pool.num_available(), 0);
  pool.check({1});
  pool.release(block);
  EXPECT_EQ(pool.num_available(), 1);
  pool.check({0});
}

TEST(BlockPool, ForgettingACachedBlockMakesItEmpty) {
  BlockPool pool(1);
  int32_t evicted;
  const int32_t block = pool.allocate(&evicted);
  pool.set_node(block, 4);
  pool.release(block);
  pool.set_node(block, -1);
  EXPECT_EQ(pool.num_cached(), 0);
  EXPECT_EQ(pool.num_empty(), 1);
  pool.check({0});
}

TEST(BlockPool, CheckFindsAReferenceThatNobodyHolds) {
  BlockPool pool(2);
  int32_t evicted;
  pool.allocate(&evicted);
  EXPECT_THROW(pool.check({0, 0}), std::logic_error);
}

// Against a model of plain lists.
TEST(BlockPool, RandomUse) {
  std::mt19937 random(1);
  BlockPool pool(20);
  std::vector<int32_t> references(20, 0), node(20, -1);
  std::list<int32_t> cached;
  for (int i = 0; i < 20000; ++i) {
    const auto block = static_cast<int32_t>(random() % 20);
    const auto b = static_cast<size_t>(block);
    switch (random() % 5) {
      case 0: {
        int32_t evicted;
        const int32_t given = pool.allocate(&evicted);
        if (given < 0) {
          ASSERT_TRUE(std::none_of(references.begin(), references.end(), [](int32_t r) { return r == 0; }));
          break;
        }
        const auto g = static_cast<size_t>(given);
        ASSERT_EQ(references[g], 0);
        ASSERT_EQ(evicted, node[g]);
        if (evicted >= 0) {
          for (size_t k = 0; k < 20; ++k) ASSERT_TRUE(references[k] > 0 || node[k] >= 0) << "an empty one was left";
          ASSERT_EQ(given, cached.front());
          cached.pop_front();
        }
        references[g] = 1;
        node[g] = -1;
        break;
      }
      case 1:
        if (references[b] == 0 && node[b] < 0) break;  // an empty block cannot be found
        if (references[b]++ == 0) cached.remove(block);
        pool.acquire(block);
        break;
      case 2:
      case 3:
        if (references[b] == 0) break;
        if (--references[b] == 0 && node[b] >= 0) cached.push_back(block);
        pool.release(block);
        break;
      case 4:
        if (references[b] == 0) break;
        node[b] = static_cast<int32_t>(random() % 1000);
        pool.set_node(block, node[b]);
        break;
    }
    pool.check(references);
    ASSERT_EQ(pool.num_cached(), static_cast<int64_t>(cached.size()));
  }
}

}  // namespace
}  // namespace quartz::engine
